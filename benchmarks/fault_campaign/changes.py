"""Mutations of files: bytes of any file, values of known formats, and planted code that must never run."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

Change = Callable[[bytes, random.Random], bytes]
BRACKETS = b"[" * 100_000
HUGE = 10**30
VALUES: list[Any] = [
    None, 0, -1, 1e308, HUGE, float("nan"), float("-inf"), "", "=1", "\x1b[31m", "\x00", "\udc80", "a" * 70_000, [],
    [[]], {}, {"a": []}, True, "2026-13-45T99:99:99", "../../../../etc/passwd", "/dev/zero", "$(touch executed)",
]  # fmt: skip
TOKENS = [
    b"", b"-1", b"0", b"1e999", b"nan", b"99999999999999999999", b"a", b"=", b"[", b"\xff", b"\x00", b"..",
    b"/dev/zero", b"!!python/object/apply:os.system ['touch executed']", b"*a", b"&a", b"{", b"\t", b"\r\n",
    b"$(touch executed)",
]  # fmt: skip
LITERALS = [
    "0", "-1", "1e308", "nan", "inf", "true", '""', '"=1"', '"\\u001b[31m"', "[]", "[[]]", "[0]", '["", ""]', "{}",
    "{a = 1}", "1979-05-27", '"../../../../etc/passwd"', '"/dev/zero"', "9223372036854775807", '"cuda:9"', '[1, "a"]',
]  # fmt: skip


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Return the content truncated, doubled in part, with brackets inserted, replaced, or with some bytes changed."""
    kind = chance.randrange(6)
    at = chance.randrange(len(content) + 1)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + content[at // 2 :]
    if kind == 2:
        return content[:at] + BRACKETS + content[at:]
    if kind == 3:
        return chance.randbytes(len(content))
    changed = bytearray(content)
    for _ in range(chance.choice((1, 4, 64)) if content else 0):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def retyped(content: bytes, chance: random.Random) -> bytes:
    """Return a JSON document with one value, anywhere, replaced or removed."""
    document = json.loads(content)
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(value, (dict, list)):
                collect(value)

    collect(document)
    node, key = chance.choice(places)
    if chance.random() < 0.15:
        del node[key]
    else:
        node[key] = chance.choice(VALUES)
    return json.dumps(document).encode()


def retold(content: bytes, chance: random.Random) -> bytes:
    """Return a text with one word or number replaced."""
    words = list(re.finditer(rb"[\w.+-]+", content))
    word = chance.choice(words)
    return content[: word.start()] + chance.choice(TOKENS) + content[word.end() :]


def reset(content: bytes, chance: random.Random) -> bytes:
    """Return a TOML file with one key's value or name changed."""
    lines = content.decode().splitlines()
    at = chance.choice([number for number, line in enumerate(lines) if " = " in line])
    key, _, value = lines[at].partition(" = ")
    lines[at] = f"{key} = {chance.choice(LITERALS)}" if chance.random() < 0.8 else f"{key[:-1]} = {value}"
    return "\n".join(lines).encode()


def rearranged(content: bytes, chance: random.Random) -> bytes:
    """Return an .npz file with one array removed, or with other values, type, shape or objects."""
    with np.load(io.BytesIO(content)) as stored:
        arrays: dict[str, Any] = dict(stored)
    name = chance.choice(sorted(arrays))
    array = arrays[name]
    bomb = np.empty(1, object)
    bomb[0] = Payload()
    others = [
        array.reshape(-1)[:0], array.reshape(-1)[:1], array[None], array.astype(str), np.array(0.0), bomb,
        np.zeros((2, 3, 4)), np.array([None]),
    ]  # fmt: skip
    if array.dtype.kind in "fi":
        others += [
            -array,
            np.full_like(array, -1),
            array * np.nan,
            array.astype(complex),
            array.astype("datetime64[s]"),
        ]
    arrays[name] = chance.choice(others)
    if chance.random() < 0.1:
        del arrays[name]
    made = io.BytesIO()
    np.savez(made, **arrays)
    return made.getvalue()


class Payload:
    """An object whose pickle runs a command when it is loaded."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch executed",)


def planted(content: bytes, chance: random.Random) -> bytes:
    """Return a pickle that runs a command, bare or in place of the pickle in a torch.save file."""
    pickled = pickle.dumps({"weight": Payload()}, protocol=chance.choice((0, 2, 4)))
    if chance.random() < 0.3 or not zipfile.is_zipfile(io.BytesIO(content)):
        return pickled
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(made, "w") as target:
        for name in source.namelist():
            target.writestr(name, pickled if name.endswith(".pkl") else source.read(name))
    return made.getvalue()


def inside_zip(content: bytes, chance: random.Random) -> bytes:
    """Return a zip file with one member mutated; its checksums are valid."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(made, "w") as target:
        names = source.namelist()
        chosen = chance.choice(names)
        for name in names:
            part = source.read(name)
            target.writestr(name, mutated(part, chance) if name == chosen else part)
    return made.getvalue()


def reheaded(content: bytes, chance: random.Random) -> bytes:
    """Return a .safetensors file with a retyped header or a wrong header length."""
    length = int.from_bytes(content[:8], "little")
    header = retyped(content[8 : 8 + length], chance)
    told = len(header) if chance.random() < 0.7 else chance.choice((0, 1, 1 << 40, (1 << 64) - 1))
    return told.to_bytes(8, "little") + header + content[8 + length :]


def regraphed(content: bytes, chance: random.Random) -> bytes:
    """Return an ONNX file with one field, anywhere, changed, removed or duplicated."""
    import onnx

    model = onnx.load_from_string(content)
    fields: list[tuple[Any, Any]] = []  # pairs of a message and one of its fields

    def collect(message: Any) -> None:
        for field, value in message.ListFields():
            fields.append((message, field))
            if field.message_type is not None:
                for each in value if field.is_repeated else [value]:
                    collect(each)

    collect(model)
    message, field = chance.choice(fields)
    value = getattr(message, field.name)
    if field.is_repeated:
        again = list(value)
        other_lists: list[list[Any]] = [again[:-1], [*again, *again], []]
        message.ClearField(field.name)
        getattr(message, field.name).extend(chance.choice(other_lists))
    elif field.message_type is not None:
        message.ClearField(field.name)
    else:
        others: dict[Any, list[Any]] = {
            str: ["", "x", "input", "Loop", "/dev/zero", "é" * 9],
            bytes: [b"", b"\xff" * 8],
            float: [0.0, 1e38],
        }
        numbers = [0, 1, 2, 3, 7, 10, 16, 127, 1 << 20, 1 << 31, (1 << 62) + 1, -1]
        options: list[Any] = others.get(type(value), numbers)
        try:
            setattr(message, field.name, chance.choice(options))
        except ValueError:  # beyond the range of the field's type
            message.ClearField(field.name)
    return bytes(model.SerializeToString())
