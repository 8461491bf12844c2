"""Model sources as the user writes them: their names, the files behind them, and what is wrong with one."""

from __future__ import annotations

import ast
import difflib
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from dyno.study.commits import split_commit
from dyno.worker import registry
from dyno.worker.nets import huggingface
from dyno.worker.nets.checkpoint import PROGRAM, Archive, advise_on_module
from dyno.worker.record import check_regular, refuse_pointer
from dyno.worker.spec import NETWORK_FILES, NETWORK_LIBRARIES, SAVED_SUFFIXES, UserError, usual_name

# Function names that don't identify a network.
GENERIC_NAMES = "build build_model create_model get_model load_model main make make_model model".split()
TORCH_SUFFIXES = (".pt", ".pth")
CHECKPOINT_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")  # weights without their network
DARKNET_SUFFIX = ".cfg"
COMPRESSION_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf": "7-Zip",
}
MIN_NAME_SIMILARITY = 0.75  # lower similarities match some of a thousand names anyway
# Formats of other programs that Dyno doesn't read, and how to convert them to ONNX. SAVED_MODEL_FILE marks a TensorFlow
# folder.
KERAS, TENSORFLOW, SAVED_MODEL_FILE = "Keras", "TensorFlow", "saved_model.pb"
OTHER_FORMATS = {
    ".keras": KERAS, ".h5": KERAS, ".hdf5": KERAS, ".pb": TENSORFLOW, ".pdmodel": "PaddlePaddle",
    ".caffemodel": "Caffe", ".mlmodel": "Core ML", ".mlpackage": "Core ML", ".gguf": "llama.cpp",
    ".mnn": "MNN",
}  # fmt: skip
FORMAT_WRITERS = {
    KERAS: "let Keras write an ONNX file: model.export('{stem}.onnx', format='onnx')",
    TENSORFLOW: "write an ONNX file: python -m tf2onnx.convert --saved-model FOLDER --output {stem}.onnx",
    "PaddlePaddle": "write an ONNX file: paddle2onnx --model_dir FOLDER --save_file {stem}.onnx",
}
# A function registered by the library's decorator, possibly with other decorators in between.
REGISTERED_FUNCTION = re.compile(r"^@register_model\b.*\n(?:@.*\n(?:[ )].*\n)*)*def (\w+)\(", re.M)


def model_name(source: str) -> str:
    """Return the model's name in tables and folders: the part after the colon, or the file's stem."""
    if source.partition(":")[0] in NETWORK_FILES:
        return Path(source.partition(":")[2]).stem
    if folder := huggingface.split_folder(source)[1]:
        return Path(folder).name or Path(folder).resolve().name  # the name of "."
    if registry.format_of(source) or source.endswith((*SAVED_SUFFIXES, *TORCH_SUFFIXES, DARKNET_SUFFIX)):
        return Path(source).stem
    location, _, function = source.rpartition(":")
    name, bracket, arguments = function.partition("(")
    if name in GENERIC_NAMES and location:
        name = Path(location).stem if location.endswith(".py") else location.rpartition(".")[2]
    return f"{name}{bracket}{arguments}" or location


def keeps_weights(source: str) -> bool:
    """Return whether the source is a file with its own weights, which no checkpoint or library weights replace.

    Such a file is often compared with the network under a checkpoint, which must not enter the file.
    """
    file = split_commit(source)[0]
    return (
        bool(registry.format_of(file)) or file.startswith("saved:") or file.endswith((*SAVED_SUFFIXES, *TORCH_SUFFIXES))
    )


def stored_source(source: str) -> str:
    """Return the source with the prefix for its content: a YOLO checkpoint (best.pt) or a TorchScript program.

    A .cfg is Darknet's. Raises `UserError` for any other file of torch.save; other sources are returned unchanged.
    """
    if Path(source).suffix in (DARKNET_SUFFIX, *TORCH_SUFFIXES):
        refuse_stand_in(source, "checkpoint")
    if Path(source).suffix == DARKNET_SUFFIX and ":" not in source:
        return f"darknet:{source}"
    if Path(source).suffix not in TORCH_SUFFIXES or not Path(source).is_file():
        return source
    archive = Archive(source)
    if archive.kind == PROGRAM:
        return f"saved:{source}"
    if not archive.yolo:
        raise UserError(f"{source} is not a model on its own: {advise_on_module(archive)}")
    return f"ultralytics:{source}"


def parse_form(text: str, names: Sequence[str]) -> tuple[str, str] | None:
    """Return the backend with its options, and the precision ("" for the default), of a form such as openvino/bf16.

    `names` are the valid backend names. None for a file or any other name, which is a model.
    """
    backend, _, precision = text.partition("/")
    name, separator, options = backend.partition("@")
    backend_name = name if name in names else usual_name(name)
    if Path(text).is_file() or backend_name not in names:
        return None
    return f"{backend_name}{separator}{options}", usual_name(precision)


@cache
def list_names(library: str) -> frozenset[str]:
    """Return the names of the library's networks; empty if it is not installed."""
    spec = find_spec(library)
    if spec is None or not spec.origin:
        return frozenset()
    files = (Path(spec.origin).parent / "models").rglob("*.py")
    return frozenset(name for file in files for name in REGISTERED_FUNCTION.findall(file.read_text(encoding="utf-8")))


def find_libraries(name: str) -> list[str]:
    """Return the installed libraries that have a network of this name."""
    return [library for library in NETWORK_LIBRARIES if name in list_names(library)]


def find_file(text: str, noun: str) -> Path:
    path = check_regular(Path(text), noun)
    if path.is_dir():
        raise UserError(f"{text} is a folder, not a {noun}")
    if not path.is_file():
        raise UserError(f"there is no {noun} {text}")
    refuse_stand_in(text, noun)
    return path


def refuse_stand_in(text: str, noun: str, *, may_be_zip: bool = True) -> None:
    """Raise `UserError` if the file is a Git LFS pointer, a web page or compressed."""
    beginning = b""
    with suppress(OSError), open(text, "rb") as file:  # reading the whole file will give the reason
        refuse_pointer(Path(text), noun)
        beginning = file.read(64)
    if beginning.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise UserError(f"{text} is a web page and not a {noun}; download the file itself")
    kinds = COMPRESSION_MAGIC | ({b"PK\3\4": "zip"} if not may_be_zip else {})
    for mark in filter(beginning.startswith, kinds):
        raise UserError(f"{text} is compressed ({kinds[mark]}) and not the {noun} itself; unpack it")


def explain_unknown_model(source: str) -> str:
    """Return the error message for a name without a source prefix."""
    if not source:  # an empty path would be the current folder
        return "a model has an empty name; give a model's file, or one like torchvision:resnet18"
    if Path(source, "study.toml").is_file():
        return f"{source} is a run folder; to resume it: dyno run {shlex.quote(str(Path(source, 'study.toml')))}"
    if program := TENSORFLOW if Path(source, SAVED_MODEL_FILE).is_file() else OTHER_FORMATS.get(Path(source).suffix):
        writer = FORMAT_WRITERS.get(program, "give the model as an ONNX file").format(stem=Path(source).stem)
        return f"{source} is a model of {program}, which Dyno doesn't read; {writer}"
    if Path(source).is_dir():
        return f"{source} is a folder; give a model's file, or FILE.py:FUNCTION"
    if form := parse_form(source, registry.list_backends()):
        backend, precision = form
        precision_flag = f" --precision {precision}" if precision else ""
        return f"{source} is a backend, not a model; give it with --backend {backend}{precision_flag}"
    if source.endswith((".yaml", ".yml")):
        return f"model {source!r} has no source prefix; did you mean ultralytics:{source}?"
    if source.endswith(".ort"):
        return f"{source} is in ONNX Runtime's own format, which only ONNX Runtime reads; give its original .onnx file"
    if Path(source).suffix == ".py":
        return _name_functions(source)
    if Path(source).suffix in CHECKPOINT_SUFFIXES and not Path(source).is_file():
        return f"there is no such file: {source}"
    if Path(source).is_file() or Path(source).suffix in CHECKPOINT_SUFFIXES:
        is_checkpoint = Path(source).suffix in CHECKPOINT_SUFFIXES
        refuse_stand_in(source, "checkpoint" if is_checkpoint else "model file", may_be_zip=is_checkpoint)
        if registry.format_of(source.lower()):
            return f"{source} ends in capitals; rename it to {Path(source).stem}{Path(source).suffix.lower()}"
        return (
            f"{source} is not a model file ({', '.join(registry.list_suffixes())}); weights need their network "
            f"(torchvision:resnet50 --weights {source}); a function is given as FILE.py:FUNCTION"
        )
    if "/" in source:
        return no_such(source)
    if "," in source:
        return f"models are given one by one, without commas: {shlex.join(source.split(','))}"
    if candidates := [f"{library}:{source}" for library in find_libraries(source)]:
        return f"{' and '.join(find_libraries(source))} each have a model {source}; give {' or '.join(candidates)}"
    names = {name: library for library in NETWORK_LIBRARIES for name in list_names(library)}
    if matches := difflib.get_close_matches(source, names, 1, MIN_NAME_SIMILARITY):
        return f"there is no model {source!r}; did you mean {names[matches[0]]}:{matches[0]}?"
    return no_such(source)


def _name_functions(source: str) -> str:
    """Return the error message for a Python file without a function, with the functions that it has."""
    path = Path(source)
    if not path.is_file():
        return f"there is no Python file {source}"
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError) as e:
        return f"{source} is not valid Python: {e}"
    calls = [f"{source}:{_describe_call(node)}" for node in body
             if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]  # fmt: skip
    if not calls:
        return f"{source} has no function; write one that returns the module, and give {source}:FUNCTION"
    return f"give one of the functions of {source}, which returns the module: {', '.join(calls)}"


def _describe_call(function: ast.FunctionDef) -> str:
    """Return a function's name with its required arguments."""
    args = function.args
    names = [a.arg for a in args.args[: len(args.args) - len(args.defaults)]]
    names += [a.arg for a, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value is None]
    return function.name + (f"({', '.join(f'{name}=…' for name in names)})" if names else "")


def no_such(path: str) -> str:
    """Return the error message for a missing path of a model or run."""
    return (
        f"there is no file or folder {path}; give a model such as torchvision:resnet18, a model's file "
        f"({', '.join(registry.list_suffixes())}) or FILE.py:FUNCTION, or a run's folder, such as runs/demo"
    )
