"""Files of torch.save are read without running anything in them, and other files are recognised."""

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from dyno.worker.nets import checkpoint
from dyno.worker.nets.checkpoint import (
    MODULE,
    OTHER,
    PROGRAM,
    WEIGHTS,
    Archive,
    Stub,
    describe_averaged,
    read_checkpoint,
)
from dyno.worker.spec import UserError
from refusals import refuses
from trap import Trap


class Inside(torch.nn.Module):
    """A user's own network with every kind of tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
        self.register_buffer("kept", torch.arange(6).reshape(2, 3).t())
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.fine = torch.nn.Parameter(torch.randn(3, dtype=torch.float16))
        self.extra: Any = {}


class Handmade:
    """A torch.save file with a handwritten pickle."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __call__(self, content: bytes, packed: bool = False, **entries: bytes) -> Path:
        path = self.place / "made.pt"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as file:
            file.writestr("made/data.pkl", content)
            for name, value in entries.items():
                file.writestr(f"made/data/{name}", value)
        return path


@pytest.fixture
def handmade(tmp_path: Path) -> Handmade:
    return Handmade(tmp_path)


def test_a_pickled_module_gives_its_state_dict(tmp_path: Path) -> None:
    module = Inside()
    torch.save({"epoch": 3, "model": module}, tmp_path / "net.pt")
    archive = Archive(tmp_path / "net.pt")
    assert (archive.kind, archive.yolo) == (MODULE, False)
    assert any(name.endswith(".Inside") for name in archive.names)
    found, wanted = checkpoint.read_tensors(checkpoint.find_module_stub(archive.load())), module.state_dict()
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    assert all(torch.equal(value, wanted[name]) for name, value in read_checkpoint(str(tmp_path / "net.pt")).items())


@pytest.mark.parametrize("place", ["top", "model", "beside", "attribute", "buffer", "key", "nested", "hook"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_planted_command_is_never_run(tmp_path: Path, place: str, protocol: int) -> None:
    mark, module = tmp_path / "ran", Inside()
    trap = Trap(mark)
    if place == "attribute":
        module.extra = trap
    if place == "buffer":
        module._buffers["kept"] = trap  # type: ignore[assignment]
    if place == "hook":
        module._forward_hooks[0] = trap  # type: ignore[assignment]
    if place == "nested":
        module.extra = [{"a": (1, {2: trap})}, trap]
    content: Any = {"top": trap, "model": {"model": trap}, "beside": {"model": module, "args": trap}}.get(place, module)
    if place == "key":
        content = {"model": module, "by": OrderedDict([(trap, 1)])}
    torch.save(content, tmp_path / "trap.pt", pickle_protocol=protocol)
    archive = Archive(tmp_path / "trap.pt")
    assert "posix.system" in archive.names
    found = checkpoint.find_module_stub(archive.load())
    if place not in ("top", "model"):
        assert torch.equal(checkpoint.read_tensors(found)["body.0.weight"], module.body[0].weight)
        read_checkpoint(str(tmp_path / "trap.pt"))
    assert checkpoint.advise_on_module(archive)
    assert not mark.exists()
    torch.load(tmp_path / "trap.pt", weights_only=False)
    assert mark.exists(), "the trap is a real one"


def test_modules_named_in_a_pickle_are_not_imported(handmade: Handmade) -> None:
    """An import alone would run code: `antigravity` opens a browser, `this` prints."""
    import sys

    sys.modules.pop("this", None)
    assert Archive(handmade(b"cthis\nzen\n.")).load().path == "this.zen" and "this" not in sys.modules


def test_a_chain_of_calls_stays_inert(handmade: Handmade) -> None:
    """The pickle calls getattr(__import__("os"), "system")("…")."""
    content = b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'system'\ntR(S'touch ran'\ntR."
    assert isinstance(Archive(handmade(content)).load(), Stub)
    assert not Path("ran").exists()


def storage(kind: str = "FloatStorage", key: str = "0", count: int = 2) -> bytes:
    return b"(S'storage'\nctorch\n%b\nS'%b'\nS'cpu'\nI%d\ntQ" % (kind.encode(), key.encode(), count)


def tensor(*, offset: int = 0, shape: bytes = b"I2\n", stride: bytes = b"I1\n", of: bytes = storage()) -> bytes:
    return b"ctorch._utils\n_rebuild_tensor_v2\n(%bI%d\n(%bt(%btI00\nNtR." % (of, offset, shape, stride)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (tensor(of=storage(count=10**12)), "the size of the tensor '0' is not what its entry says"),
        (tensor(of=storage(key="7")), "the size of the tensor '7'"),
        (tensor(of=storage("QInt8Storage")), "tensor of an unknown kind, QInt8"),
        (tensor(shape=b"I-1\n"), "invalid shape or stride"),
        (b"S'elsewhere'\nQ.", "refers to something other than a tensor"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n}b.", "a function is given a state"),
        (b"\x80\x02Nr\xff\xff\xff\xff.", "the pickle has LONG_BINPUT 4294967295"),
        (b"\x80\x04\x82\x01.", "the pickle has EXT1"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "cut short or damaged"),
        (b"ccollections\nOrderedDict\n}S'x'\nI1\nsb.", "is damaged, or not a file of torch.save"),
        (b"(lp0\n", "cut short or damaged"),
    ],
)
def test_false_sizes_and_invalid_pickles_are_refused(handmade: Handmade, content: bytes, reason: str) -> None:
    refuses(reason, Archive(handmade(content, **{"0": bytes(8)})).load)


def test_a_tensor_beyond_its_stored_bytes_is_refused(handmade: Handmade) -> None:
    state = b"(dS'_modules'\n(dsS'_buffers'\n(dsS'_parameters'\n(dS'w'\n%bss"
    content = b"cnet\nNet\n)\x81" + state % tensor(shape=b"I9\n")[:-1] + b"b."
    module = Archive(handmade(b"\x80\x02" + content, **{"0": bytes(8)})).load()
    refuses("the tensor w reaches beyond its stored bytes", checkpoint.read_tensors, module)


def test_reading_a_module_that_contains_itself_ends(handmade: Handmade) -> None:
    state = b"(dS'_buffers'\n(dsS'_parameters'\n(dsS'_modules'\n(dS'again'\ng0\nss"
    module = Archive(handmade(b"\x80\x02cnet\nNet\n)\x81p0\n" + state + b"b.")).load()
    assert checkpoint.is_module(module) and checkpoint.read_tensors(module) == {}


def test_compressed_entries_are_refused(handmade: Handmade) -> None:
    with pytest.raises(UserError, match="its entries are packed, or larger than the file"):
        Archive(handmade(pickle.dumps([0]), packed=True, **{"0": bytes(10**6)}))


def script(path: Path) -> None:
    torch.jit.trace(torch.nn.Linear(1, 1), torch.zeros(1, 1)).save(path)


@pytest.mark.parametrize(
    ("save", "kind", "advice"),
    [
        (lambda path: torch.save(Inside().state_dict(), path), WEIGHTS, "weights without their network: give that too"),
        (lambda path: torch.save({"model": {}, "path": Path("x")}, path), OTHER, "weights and objects (pathlib"),
        (lambda path: torch.save(Inside(), path), MODULE, "it is a pickled module"),
        (lambda path: torch.save(torch.nn.Linear(1, 1), path), MODULE, "it is a pickled module (of torch.nn)"),
        (script, PROGRAM, "it is a TorchScript program"),
    ],
)
def test_file_kinds_are_distinguished(tmp_path: Path, save: Any, kind: str, advice: str) -> None:
    save(tmp_path / "x.pt")
    archive = Archive(tmp_path / "x.pt")
    assert archive.kind == kind and advice in checkpoint.advise_on_module(archive)


def test_files_not_from_torch_save_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("weights")
    torch.save([], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as file:
        file.writestr("a.txt", "a")
    for name, reason in {
        "text": "cut short, or not a torch.save file",
        "old": "of PyTorch 1.6 or later",
        "other": "no data.pkl",
    }.items():
        refuses(reason, Archive, tmp_path / f"{name}.pt")


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema", "ema"])
def test_unused_averaged_weights_are_named(tmp_path: Path, key: str) -> None:
    raw, averaged = torch.nn.Linear(2, 2).state_dict(), torch.nn.Linear(2, 2).state_dict()
    torch.save({"state_dict": raw, key: averaged, "epoch": 3}, tmp_path / "both.pt")
    torch.save({"state_dict": raw, "epoch": 3}, tmp_path / "one.pt")
    assert f"under {key}; those under state_dict were taken" in describe_averaged(str(tmp_path / "both.pt"))
    assert torch.equal(read_checkpoint(str(tmp_path / "both.pt"))["weight"], raw["weight"])
    assert describe_averaged(str(tmp_path / "one.pt")) == ""


def test_unused_averaged_weights_of_a_lightning_module_are_named(tmp_path: Path) -> None:
    raw, averaged = ({f"{i}.{name}": torch.rand(2) for i in (0, 1) for name in ("weight", "bias")} for _ in "ab")
    loss, steps = {"loss.weight": torch.rand(2)}, torch.tensor(3)

    def describe(*parts: dict[str, torch.Tensor]) -> str:
        torch.save({"state_dict": {k: v for part in parts for k, v in part.items()}}, tmp_path / "both.ckpt")
        return describe_averaged(str(tmp_path / "both.ckpt"))

    def put(start: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"{start}.{name}": value for name, value in tensors.items()}

    model = put("model", raw)
    line = describe(model, {"model_ema.n_averaged": steps}, put("model_ema.module", averaged), loss)
    assert "under model_ema.module; those under model were taken: to measure the others, save them alone" in line
    line = describe(put("model._orig_mod", raw), put("ema.online_model", raw), put("ema.ema_model", averaged))
    assert "under ema.ema_model; those under model were taken" in line, "the online copy has the same values"
    assert describe(model, loss) == "" and describe(model, put("ema.module", raw)) == ""
    assert describe(put("a", {"weight": raw["0.weight"]}), put("b", raw)) == "", "layers of the same shape"
