"""A fault campaign: does anything break, hang, lose or invent a measurement when the world around Dyno misbehaves?

- kills: a study is killed with SIGKILL at a random moment, the parent alone or one of its workers, and started again,
  `--kills` times. Records that ended well before a kill must be there after it, byte for byte; at the end every round
  is there once and whole, and no scratch folder is left.
- full disk: the same study under a limit on how large a file may grow (RLIMIT_FSIZE), at every power of two from 0 up,
  ends in one line or in rows that say why, and goes on to its end once there is room.
- mutations: copies of a model, a checkpoint, an image, a study, a job, a record and samples in which bytes are flipped,
  cut, doubled, or replaced by deep brackets and values of other types, `--mutations` in all. The command must end by
  itself, without a traceback, and say at most a line of what is wrong.

Prints a line per part and what failed; exit code 1 where anything did. The seed makes a campaign repeatable but for the
moments of the kills, which depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dyno.analysis.records.arrays import read_npz

LIMIT_S = 300.0  # a command that takes longer hangs
SHORT = "--rounds 1 --seconds 0.02 --warmup 0.01 --threads 1".split()
STUDY = """models = ["fake:net"]
backends = ["fake@latency_ms=0.1", "fake@latency_ms=0.2"]
channels = 1
rounds = 3
seconds = 0.05
warmup = 0.02
threads = 1
"""
VALUES: list[Any] = [None, 0, -1, 1e308, "", "=1", "\x1b[31m", [], [[]], {}, {"a": []}, True]
BRACKETS = b"[" * 100_000


@dataclass
class Campaign:
    """What is under test, by chance that can be repeated, and what was found wrong."""

    folder: Path
    chance: random.Random
    wrong: list[str] = field(default_factory=list)

    def start(self, *words: object, **how: Any) -> subprocess.Popen[str]:
        """The command line, with a cache of its own."""
        env = {**os.environ, "DYNO_CACHE": str(self.folder / "cache"), "COLUMNS": "200"}
        command = [sys.executable, "-m", "dyno", *map(str, words)]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=self.folder, env=env, text=True, errors="replace", **pipes, **how)

    def command(self, *words: object) -> subprocess.Popen[str]:
        """A command that nothing happens to while it runs; a test may start it in a quicker way."""
        return self.start(*words)

    def ended(self, process: subprocess.Popen[str], what: str) -> tuple[int, str, str]:
        """Exit code and what was said; a hang, a traceback or a death by a signal is kept as wrong."""
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            self.wrong.append(f"{what}: hangs")
            return -1, "", ""
        if "Traceback" in out + err or process.returncode < 0 or process.returncode not in (0, 1, 2, 3):
            last = (err.strip().splitlines() or [""])[-1]
            self.wrong.append(f"{what}: exit code {process.returncode}: {last}")
        if process.returncode == 2 and err.count("dyno: ") != 1:
            self.wrong.append(f"{what}: not one line: {err[-300:]!r}")
        if "\x1b" in out + err:
            self.wrong.append(f"{what}: escape codes are printed")
        return process.returncode, out, err


def good(run: Path) -> dict[str, bytes]:
    """Records of the run that ended well, by their place."""
    found = {}
    for path in run.glob("trials/*/r*/record.json"):
        content = path.read_bytes()
        if json.loads(content)["status"] == "ok":
            found[str(path.relative_to(run))] = content
    return found


def kills(campaign: Campaign, count: int) -> str:
    """Kill parents and workers at random moments; what it came to, in a sentence."""
    whom: Counter[str] = Counter()
    finished = 0
    number = 0
    while sum(whom.values()) < count:
        run = campaign.folder / f"killed{number}"
        number += 1
        while sum(whom.values()) < count:
            before = good(run)
            process = campaign.start("run", campaign.folder / "study.toml", "--out", run)
            victim = _strike(campaign, process)
            code, _, _ = campaign.ended(process, f"kill of a {victim}") if victim != "parent" else _reaped(process)
            whom[victim] += victim != "nobody"
            after = good(run)
            lost = [place for place, content in before.items() if after.get(place) != content]
            campaign.wrong += [f"kill of a {victim}: {place} was lost or measured twice" for place in lost]
            if code == 0 or victim == "nobody":
                break
        campaign.ended(
            campaign.command("run", campaign.folder / "study.toml", "--out", run, "--retry-failed"), "the end"
        )
        finished += 1
        campaign.wrong += list(_not_whole(run))
    left = list((campaign.folder / "cache").glob("artifacts/.*.*"))
    campaign.wrong += [f"{path.name} stays in the cache" for path in left]
    return f"kills: {whom['parent']} of parents, {whom['worker']} of workers in {finished} studies"


def _reaped(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


def _strike(campaign: Campaign, process: subprocess.Popen[str]) -> str:
    """Wait for a random moment and kill the command or one of its workers; who it was."""
    time.sleep(campaign.chance.uniform(0.2, 6.0))
    if process.poll() is not None:
        return "nobody"
    workers = psutil.Process(process.pid).children(recursive=True) if campaign.chance.random() < 0.5 else []
    victim = campaign.chance.choice(workers) if workers else psutil.Process(process.pid)
    try:
        victim.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return "nobody"
    return "worker" if workers else "parent"


def _not_whole(run: Path) -> Iterator[str]:
    """What a finished study lacks: each of two trials has three rounds that ended well, with samples that can be
    read."""
    records = good(run)
    if len(records) != 6:
        yield f"{run.name}: {len(records)} of 6 rounds are there"
    for place in records:
        names = {m["samples"] for m in json.loads(records[place])["measurements"] if m["samples"]}
        if not names <= read_npz(run / Path(place).with_name("samples.npz")).keys():
            yield f"{run.name}: {place} has no samples"


def full_disk(campaign: Campaign) -> str:
    """Every size at which a file may stop to grow; what it came to, in a sentence."""
    ended: Counter[int] = Counter()
    for power in range(0, 18, 2):
        run = campaign.folder / f"full{power}"
        process = campaign.start(
            "run", campaign.folder / "study.toml", "--rounds", 1, "--out", run, preexec_fn=_limited(1 << power)
        )
        code, _, err = campaign.ended(process, f"files of at most {1 << power} bytes")
        ended[code] += 1
        if code == 0 and len(good(run)) != 2:
            campaign.wrong.append(f"files of at most {1 << power} bytes: ended well without its records: {err[-200:]}")
        again = campaign.command("run", campaign.folder / "study.toml", "--rounds", 1, "--out", run, "--retry-failed")
        code, _, err = campaign.ended(again, "with room again")
        if code or len(good(run)) != 2:
            campaign.wrong.append(f"after files of at most {1 << power} bytes: exit code {code}: {err[-200:]}")
    codes = ", ".join(f"{n} with exit code {code}" for code, n in sorted(ended.items()))
    return f"full disk: {sum(ended.values())} limits, {codes}; all were finished with room again"


def _limited(most: int) -> Callable[[], None]:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write fails with EFBIG then, as a full disk's does
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    return limit


def mutated(content: bytes, chance: random.Random) -> bytes:
    """The content with something wrong in it."""
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
    for _ in range(chance.choice((1, 4, 64))):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def retyped(content: bytes, chance: random.Random) -> bytes:
    """A JSON document in which one value, anywhere, is of another kind."""
    document = json.loads(content)
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(value, (dict, list)):
                collect(value)

    collect(document)
    node, key = chance.choice(places)
    node[key] = chance.choice(VALUES)
    return json.dumps(document).encode()


def mutations(campaign: Campaign, count: int) -> str:
    """Read, measure and resume with files in which something is wrong; what it came to, in a sentence."""
    ended: Counter[int] = Counter()
    kinds = list(_subjects(campaign))
    for number in range(count):
        name, path, commands = kinds[number % len(kinds)]
        whole = path.read_bytes()
        change = retyped if path.suffix == ".json" and campaign.chance.random() < 0.6 else mutated
        path.write_bytes(change(whole, campaign.chance))
        for words in commands:
            code = campaign.ended(campaign.command(*words), f"{name} {number}: dyno {words[0]}")[0]
            ended[code] += 1
            if any(line.startswith(f"{name} {number}: ") for line in campaign.wrong):
                shutil.copy(path, campaign.folder / f"wrong-{number}-{path.name}")
        path.write_bytes(whole)
    codes = ", ".join(f"{n} with exit code {code}" for code, n in sorted(ended.items()))
    return f"mutations: {count} files of {len(kinds)} kinds, {sum(ended.values())} commands, {codes}"


def _subjects(campaign: Campaign) -> Iterator[tuple[str, Path, list[list[Any]]]]:
    """Files to change, and the commands that read them: (kind, file, commands)."""
    run = campaign.folder / "read"
    code, _, err = campaign.ended(
        campaign.command("run", campaign.folder / "study.toml", "--rounds", 1, "--out", run), "read"
    )
    if code:
        raise RuntimeError(f"the study to be changed could not be measured: {err}")
    look: list[list[Any]] = [["show", run], ["report", run, "--out", campaign.folder / "page"]]
    first = min(run.glob("trials/*/r0"))
    for name in ("record.json", "job.json", "samples.npz"):
        yield name, first / name, look if name != "job.json" else look[:1]
    for name in ("environment.json", "study.toml"):
        yield name, run / name, look[:1]
    copy = campaign.folder / "copy.toml"
    copy.write_text(STUDY)
    yield "study", copy, [["run", copy, "--dry-run"]]
    try:
        yield from _models(campaign)
    except ImportError as e:
        print(f"without {e.name}: no models, checkpoints and images")


def _models(campaign: Campaign) -> Iterator[tuple[str, Path, list[list[Any]]]]:
    import onnx
    import torch
    from PIL import Image

    shape = [2, 3, 8, 8]
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in ("input", "output")]
    add = onnx.helper.make_node("Add", ["input", "input"], ["output"])
    graph = onnx.helper.make_graph([add], "g", ends[:1], ends[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    file = campaign.folder / "m.onnx"
    onnx.save(model, file)
    out = ["--out", campaign.folder / "models"]
    yield "model", file, [["run", file, "--backends", "onnxruntime", *SHORT, *out]]
    code = campaign.folder / "net.py"
    code.write_text("from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4))\n")
    weights = campaign.folder / "net.pth"
    torch.save({"1.weight": torch.zeros(4, 192), "1.bias": torch.zeros(4)}, weights)
    words = [f"{code}:net", "--weights", weights, "--sizes", 8, "--backends", "pytorch"]
    yield "checkpoint", weights, [["run", *words, *SHORT, "--out", campaign.folder / "weights"]]
    for name in ("cat", "dog"):
        (campaign.folder / "photos" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (12, 12), (90 * number, 30, 60)).save(campaign.folder / "photos" / name / f"{number}.png")
    data = ["--data", campaign.folder / "photos", "--sizes", 8, "--channels", 3]
    image = campaign.folder / "photos/cat/0.png"
    out = ["--out", campaign.folder / "images"]
    yield "image", image, [["run", "fake:net", *data, "--backends", "fake", *SHORT, *out]]


def main() -> int:
    """Every part that is asked for; 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for everything that was made (default: a temporary one)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "study.toml").write_text(STUDY)
        campaign = Campaign(folder, random.Random(given.seed))
        begin = time.monotonic()
        print(kills(campaign, given.kills), flush=True)
        print(full_disk(campaign), flush=True)
        print(mutations(campaign, given.mutations), flush=True)
        for line in campaign.wrong:
            print(f"WRONG {line}")
        print(f"{len(campaign.wrong)} wrong in {time.monotonic() - begin:.0f} s (seed {given.seed})")
    return int(bool(campaign.wrong))


if __name__ == "__main__":
    sys.exit(main())
