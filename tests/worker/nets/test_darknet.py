"""Darknet's networks give the results of OpenCV's own reader, and broken files end in one clear line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from darknet_files import CLASSES, EVERY, LARGE, NET, TINY3, conv, head, section, write
from dyno.worker.nets import models
from dyno.worker.spec import ModelSpec
from refusals import refuses

cv2 = pytest.importorskip("cv2")
torch = pytest.importorskip("torch")
if not hasattr(cv2.dnn, "readNetFromDarknet"):
    pytest.skip("this OpenCV reads no Darknet files; install opencv-python<5", allow_module_level=True)


@pytest.fixture(scope="module")
def photograph() -> np.ndarray:
    """Return a real image of the networks' size, float32 [1, 3, 64, 96] from 0 to 1."""
    data = pytest.importorskip("skimage.data")
    return cv2.dnn.blobFromImage(data.astronaut()[100:228, 100:292], 1 / 255, (96, 64))


def module(cfg: Path, weights: Path | str = "", **fields: Any) -> Any:
    return models.build(ModelSpec(cfg.stem, f"darknet:{cfg}", weights=str(weights), **fields))


@pytest.mark.parametrize("name", EVERY)
def test_outputs_match_opencv(name: str, photograph: np.ndarray, tmp_path: Path) -> None:
    cfg, weights = write(tmp_path, name)
    other = cv2.dnn.readNetFromDarknet(str(cfg), str(weights))
    other.setInput(photograph)
    expected = other.forward(other.getUnconnectedOutLayersNames())
    with torch.inference_mode():
        outputs = module(cfg, weights)(torch.from_numpy(photograph)).numpy()
    if name == "classifier":
        np.testing.assert_allclose(outputs, np.reshape(expected[0], (1, -1)), rtol=1e-4, atol=1e-5)
        return
    # OpenCV's rows: by cell with all anchors of each, and tiny scores set to 0. Dyno's rows: by anchor.
    heads = [each.reshape(-1, 3, each.shape[1]).transpose(1, 0, 2).reshape(-1, each.shape[1]) for each in expected]
    rows, values = np.concatenate(heads), outputs[0].T
    assert values.shape == (len(rows), 4 + CLASSES)
    np.testing.assert_allclose(values[:, :4] / [96, 64, 96, 64], rows[:, :4], rtol=1e-4, atol=1e-4)
    shown = rows[:, 5:] > 0
    assert shown.mean() > 0.3, "the random scores say little"
    np.testing.assert_allclose(values[:, 4:][shown], rows[:, 5:][shown], rtol=1e-4, atol=1e-4)


def test_a_dilated_convolution_matches_pytorch(tmp_path: Path) -> None:
    """OpenCV ignores `dilation`, so the test compares with the definition."""
    text = NET + section("convolutional", filters=4, size=3, pad=1, dilation=3, activation="linear")
    cfg, weights = write(tmp_path, "dilated", text)
    net, x = module(cfg, weights), torch.randn(1, 3, 64, 96)
    weight, bias = (value for _, value in sorted(net.state_dict().items(), reverse=True))
    expected = torch.nn.functional.conv2d(x, weight, bias, padding=3, dilation=3)
    torch.testing.assert_close(net(x), expected.flatten(1))


def test_weights_of_the_wrong_length_are_refused(tmp_path: Path) -> None:
    cfg, weights = write(tmp_path, "yolov3-tiny")
    whole = weights.read_bytes()
    cases = {
        whole[
            :-4
        ]: r"end in layer 19 \(\[convolutional\] in line \d+ of .*\.cfg\), which needs 672 values where 671 are",
        whole + bytes(400): "100 values are left over",
        whole[:-3]: "bytes end within a value",
        whole[:8]: "too short",
        b"": "too short",
    }
    for content, message in cases.items():
        weights.write_bytes(content)
        refuses(message, module, cfg, weights)
    refuses("doesn't exist", module, cfg, tmp_path / "other.weights")
    refuses(r"need the \.cfg", models.build, ModelSpec("r", "torchvision:resnet18", weights=str(weights)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"doesn't begin with \[net\]"),
        (NET, "has 0 layers"),
        ("channels=3\n" + NET, "line 1: 'channels=3' is neither"),
        (NET + section("lstm", output=3), r"\[lstm\] in line 7: this layer isn't supported"),
        (NET + conv("many"), "filters=many is not a number"),
        (NET + conv(1 << 40), "filters=1099511627776 must be between 1 and 65536"),
        (NET + conv(65536) + conv(65536), "too many weights"),
        (NET + conv(8, groups=3) + conv(8, groups=3), "groups=3 divides 3 input channels and 8 filters unevenly"),
        (NET + conv(8, activation="magic"), "the activation 'magic' isn't supported"),
        (NET + conv(8) + section("route", layers=4), "layers=4 must name layers before it, which are 0 to 0"),
        (NET + conv(8) + section("route", layers=-1, groups=2, group_id=2), "group_id=2 must be less than groups=2"),
        (NET + conv(8) + section("route", layers=-1, groups=3), "groups=3 divides 8 channels unevenly"),
        (NET + conv(8) + section("route"), "layers= must name layers before it"),
        (NET + conv(8) + conv(8, stride=2) + section("route", layers="-1,-2"), "puts layers of different sizes"),
        (NET + conv(8) + conv(4) + section("shortcut", **{"from": -2}), "adds layers of 4 and 8 channels"),
        (NET + conv(8) + section("yolo", mask="0", anchors="1,2,3", classes=2), "anchors are pairs"),
        (NET + conv(8) + section("yolo", mask="7", anchors="1,2", classes=2), "mask=7 must name some of the 1 anchors"),
        (NET + conv(8) + section("yolo", mask="0", anchors="1,2", classes=2), "1 anchors of 2 classes need 7"),
        (TINY3.replace("classes=2", "classes=3", 1).replace("filters=21", "filters=24", 1), "of 2 and 3 classes"),
        (LARGE.replace("probability=0.5", "probability"), "is neither"),
    ],
)
def test_a_broken_architecture_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "net.cfg").write_text(text)
    refuses(message, module, tmp_path / "net.cfg")


def test_classes_and_channels_must_match_the_file(tmp_path: Path) -> None:
    cfg, _ = write(tmp_path, "yolov4-tiny")
    refuses("has 2 classes, not 80", module, cfg, classes=80)
    refuses("give --channels 3", module, cfg, channels=1)
    refuses(r"--weights FILE\.weights", module, cfg, pretrained=True)


def test_the_scaled_yolov4_head_is_activated_in_its_convolution(tmp_path: Path) -> None:
    """`new_coords`: place times scale around the cell, extent (2 t)^2 times the anchor."""
    text = NET + conv(8, stride=8) + head("0,1,2", activation="logistic", new_coords=1, scale_x_y=2.0)
    cfg, weights = write(tmp_path, "csp", text)
    net = module(cfg, weights)
    x = torch.rand(1, 3, 64, 96)
    with torch.inference_mode():
        t = net.layers.get_submodule("1")(net.layers.get_submodule("0")(x))[0].reshape(3, 7, 8, 12)
        values = net(x)[0].reshape(6, 3, 8, 12)
    row, column, anchor = 5, 9, 1
    place = t[anchor, :, row, column]
    expected = [(place[0] * 2 - 0.5 + column) * 8, (place[1] * 2 - 0.5 + row) * 8, (2 * place[2]) ** 2 * 23,
                (2 * place[3]) ** 2 * 27, place[4] * place[5], place[4] * place[6]]  # fmt: skip
    torch.testing.assert_close(values[:, anchor, row, column], torch.stack(expected))
