"""Mutated files read by commands: each command must end by itself, successfully or with one line."""

from __future__ import annotations

import csv
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fault_campaign.campaign import Campaign
from benchmarks.fault_campaign.changes import Change

Words = Sequence[Any]


@dataclass
class Subject:
    """A kind of file, the files that one command reads, and the commands that read them (`reads`).

    Each turn runs the first command; every fourth turn also another one. `made` lists the commands' output, removed so
    that each command starts afresh. `share` is the kind's number of files relative to other kinds.
    """

    kind: str
    files: Sequence[Path]
    reads: Sequence[Words] | Callable[[Sequence[Path]], Sequence[Words]]
    changes: Sequence[Change]
    share: int = 1
    made: Sequence[Path] = ()
    kept: Path | None = None  # a folder that commands change, restored after each
    cache: Path | None = None  # cache of its commands, in place of the campaign's
    ended: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.whole = {path: path.read_bytes() for path in self.files}
        self._copy = self.kept.with_name(f"{self.kept.name}.kept") if self.kept else None
        if self.kept and self._copy and not self._copy.exists():  # a copy that several kinds of files may share
            shutil.copytree(self.kept, self._copy)

    def commands(self, files: Sequence[Path]) -> Sequence[Words]:
        """Return the commands that read these files; a fixed list reads all files."""
        return self.reads(files) if callable(self.reads) else self.reads

    def of_turn(self, files: Sequence[Path], turn: int) -> list[Words]:
        """Return the first command, and in every fourth turn another one."""
        first, *others = self.commands(files)
        return [first, others[turn // 4 % len(others)]] if others and turn % 4 == 0 else [first]

    def place(self, folder: Path) -> str:
        """Return the folder below `folder` that holds the subject; subjects of one folder run one after the other."""
        return self.files[0].relative_to(folder).parts[0]

    def put_back(self) -> None:
        """Restore all files and remove the commands' output."""
        for path in self.made:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if self.kept and self._copy:
            shutil.rmtree(self.kept)
            shutil.copytree(self._copy, self.kept)
        for path, content in self.whole.items():
            path.write_bytes(content)


def learn(campaign: Campaign, subjects: Iterable[Subject]) -> list[Subject]:
    """Run every command on whole files: what it starts, unpickles and runs is expected. Return the subjects that end
    well; record the others in `wrong`."""
    learnt, good = set[str](), list[Subject]()
    for subject in subjects:
        before = len(campaign.wrong)
        for words in subject.commands(subject.files):
            if (line := " ".join(map(str, words))) not in learnt:
                learnt.add(line)
                code, _, err = campaign.run(f"{subject.kind}, whole: {line}", *words, cache=subject.cache)
                subject.put_back()
                if code:
                    campaign.wrong.append(f"{subject.kind}, whole: dyno {line}: exit code {code}: {err[-300:]}")
        campaign.expected |= campaign.noted()
        good += [subject] if len(campaign.wrong) == before else []
    return good


def mutate(campaign: Campaign, subjects: Sequence[Subject], count: int, beside: int = 1) -> str:
    """Change each file in one place, run `beside` commands at a time, and return counts of their endings."""
    shares = sum(subject.share for subject in subjects)
    wanted = {subject.kind: -(-count * subject.share // shares) for subject in subjects}
    busy, choosing = set[str](), threading.Lock()

    def work() -> None:
        while True:
            with choosing:
                left = [one for one in subjects if one.ended.total() < wanted[one.kind]]
                left = [one for one in left if one.place(campaign.folder) not in busy]
                if not left:
                    return
                subject = min(left, key=lambda one: one.ended.total() / wanted[one.kind])
                busy.add(subject.place(campaign.folder))
            try:
                _turn(campaign, subject, wanted[subject.kind] - subject.ended.total())
            finally:
                with choosing:
                    busy.discard(subject.place(campaign.folder))
                    _save(campaign.folder / "mutations.csv", subjects)

    with ThreadPoolExecutor(beside) as pool:
        for each in [pool.submit(work) for _ in range(beside)]:
            each.result()
    ends = sum((subject.ended for subject in subjects), Counter[str]())
    counts = ", ".join(f"{n} {end}" for end, n in ends.most_common())
    return f"mutations: {ends.total()} files of {len(subjects)} kinds: {counts}"


def _turn(campaign: Campaign, subject: Subject, most: int) -> None:
    """Change and read one file, or some of several; after a bad or early end, read each changed file alone."""
    turn, subject.turns = subject.turns, subject.turns + 1
    chance = random.Random(f"{campaign.seed} {subject.kind} {turn}")
    count = min(most, 1 + len(subject.files) // 2)  # whole files keep a command from ending before it has read the rest
    chosen = chance.sample(list(subject.files), min(count, len(subject.files)))
    changed = {path: chance.choice(subject.changes)(subject.whole[path], chance) for path in chosen}
    if len(changed) > 1:
        codes = [_read(campaign, subject, changed, words, turn) for words in subject.of_turn(subject.files, turn)]
        if BAD not in codes and 2 not in codes:
            subject.ended[END[max(codes)]] += len(changed)
            return
    for path, content in changed.items():
        codes = [_read(campaign, subject, {path: content}, words, turn) for words in subject.of_turn([path], turn)]
        subject.ended[END[max(codes)]] += 1


BAD = 99  # beyond the exit codes
END = {
    0: "ended well", 1: "over the budget", 2: "one line and exit code 2", 3: "failed rows and exit code 3",
    BAD: "wrong",
}  # fmt: skip


def _read(campaign: Campaign, subject: Subject, changed: dict[Path, bytes], words: Words, turn: int) -> int:
    """Return the command's exit code, or `BAD` with its files kept."""
    for path, content in changed.items():
        path.write_bytes(content)
    begin = time.monotonic()
    names = " ".join(str(path.relative_to(campaign.folder)) for path in changed)
    what = f"{subject.kind}, turn {turn}, {names}: dyno {' '.join(map(str, words))}"
    code, _, _ = campaign.run(what, *words, cache=subject.cache)
    campaign.unexpected(what)
    subject.seconds += time.monotonic() - begin
    wrong = [line for line in campaign.wrong if line.startswith(f"{what}: ")]
    if wrong:
        print("\n".join(f"WRONG {line}" for line in wrong), flush=True)
        place = Path(
            tempfile.mkdtemp(prefix=f"{subject.kind.replace(' ', '-').replace('/', '-')}-", dir=campaign.kept())
        )
        (place / "wrong").write_text("\n".join(wrong))
        for path, content in changed.items():
            (place / path.relative_to(campaign.folder).as_posix().replace("/", "+")).write_bytes(content)
    subject.put_back()
    return BAD if wrong else code


def _save(path: Path, subjects: Iterable[Subject]) -> None:
    with open(path, "w", newline="") as f:
        rows = csv.writer(f)
        rows.writerow(["kind of file", "files", *END.values(), "seconds"])
        for one in subjects:
            counts = [one.ended[end] for end in END.values()]
            rows.writerow([one.kind, one.ended.total(), *counts, round(one.seconds)])
