"""A small network that is right in float and wrong in int8: a target for the mixed-precision search."""

import warnings
from pathlib import Path

import numpy as np

from dyno import data as dyno_data
from dyno.store import cache_dir

SIZE, FACTOR = 16, 3000.0


def write(path: Path) -> None:
    """Write a digit classifier as ONNX, with one channel so large that no int8 range fits its whole layer.

    The next layer divides that channel by the same factor, so the float outputs don't change.
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = dyno_data.prepare_digits(cache_dir() / "datasets", SIZE)
    images, labels = (np.load(Path(data.folder) / f"{name}.npy") for name in ("images", "labels"))
    index = np.load(Path(data.folder) / "train.npy")
    pixels = torch.from_numpy((images[index].astype(np.float32) / 255 - 0.5) / 0.5)
    target, nn = torch.from_numpy(labels[index]), torch.nn
    net = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
                        nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))  # fmt: skip
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for step in range(240):
        some = torch.arange(step * 64, step * 64 + 64) % len(target)
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(pixels[some]), target[some]).backward()
        optimiser.step()
    with torch.no_grad():
        net[2].weight[0] *= FACTOR
        net[2].bias[0] *= FACTOR
        net[4].weight[:, 0] /= FACTOR
    free = {"input": {0: "batch"}, "output": {0: "batch"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net.eval(), (torch.zeros(1, 1, SIZE, SIZE),), path, input_names=["input"],
                          output_names=["output"], dynamic_axes=free, opset_version=17, dynamo=False)  # fmt: skip
