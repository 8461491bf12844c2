"""A run as one file: its content, anonymity, the check of its verdict, and refusals."""

import getpass
import io
import json
import pickle
import platform
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dyno
from dyno import Study
from dyno.packs import opening

TOLD = "verified: "


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, fake_study: Callable[..., Study]) -> Path:
    """Run of three rounds of two engines; the second takes twice as long."""
    folder = tmp_path_factory.mktemp("measured") / "net"
    backends = ("fake@latency_ms=1", "fake@latency_ms=2")
    dyno.run(fake_study(backends=backends, rounds=3, samples=30), folder, quiet=True)
    return folder


@pytest.fixture(scope="module")
def file(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dyno.pack(run, tmp_path_factory.mktemp("packed") / "net.pack.zip")


def members(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as packed:
        return {info.filename: packed.read(info) for info in packed.infolist()}


def write(path: Path, content: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in content.items():
            packed.writestr(name, data)
    return path


def samples(file: Path) -> tuple[dict[str, bytes], str, dict[str, Any]]:
    """Return a pack's members, the name of its first samples file, and that file's arrays."""
    content = members(file)
    name = next(name for name in content if name.endswith("samples.npz"))
    return content, name, dict(np.load(io.BytesIO(content[name])))


def npz(arrays: dict[str, Any], **options: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays, **options)
    return out.getvalue()


def test_a_pack_is_verified(call: Any, run: Path, file: Path) -> None:
    _, out, _ = call("verify", file, code=0)
    assert re.fullmatch(rf"{TOLD}\d+ numbers of the verdict follow from the samples\n", out)
    found = json.loads(call("verify", file, "--format", "json", code=0)[1])
    assert found == {"verified": True, "numbers": dyno.verify(file).numbers, "differences": []}
    assert found["numbers"] > 20
    _, out, _ = call("pack", run, "-o", "again.pack.zip", code=0)
    assert out == "again.pack.zip\n" and Path("again.pack.zip").read_bytes() == file.read_bytes(), "the same bytes"
    shown = json.loads(call("show", run, "--format", "json", code=0)[1])
    stored = json.loads(members(file)["verdict.json"])
    assert [d["candidates"] for d in stored["decisions"]] == [d["candidates"] for d in shown["decisions"]]
    numbers = [[row["latency_ms"], row["speedup"]] for row in shown["tables"]["trials"]["rows"]]
    assert [[row["latency_ms"], row["speedup"]] for row in stored["rows"]] == numbers


@pytest.mark.parametrize("name", ["b", "fake", "tables"])
def test_any_folder_name_can_be_packed(
    call: Any, run: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, name)
    call("pack", name, "-o", "any.zip", code=0)
    assert call("verify", "any.zip", code=0)[1].startswith(TOLD)


def test_a_changed_sample_is_detected(call: Any, file: Path, tmp_path: Path) -> None:
    content, name, arrays = samples(file)
    arrays["latency_model"] = arrays["latency_model"] * 0.5
    _, out, _ = call("verify", write(tmp_path / "net.zip", {**content, name: npz(arrays)}), code=1)
    assert out.startswith("not verified: ") and re.search(r"is \S+, but the samples give", out)


@pytest.mark.parametrize("key", ["latency_ms", "speedup", "candidates", "text", "left out"])
def test_a_changed_verdict_is_detected(call: Any, file: Path, tmp_path: Path, key: str) -> None:
    content = members(file)
    verdict = json.loads(content["verdict.json"])
    if key == "left out":
        verdict["rows"].pop()
    elif key in ("candidates", "text"):
        verdict["decisions"][0][key] = ["another"] if key == "candidates" else "another"
    else:
        row = next(row for row in verdict["rows"] if row[key] not in (None, 1.0))
        row[key] *= 1.0001
    changed = write(tmp_path / "net.zip", {**content, "verdict.json": json.dumps(verdict).encode()})
    _, out, _ = call("verify", changed, code=1)
    assert out.startswith("not verified: ")


def test_changed_numbers_and_words_are_named(call: Any, file: Path, tmp_path: Path) -> None:
    content, name, arrays = samples(file)
    arrays["latency_model"][3] = np.nextafter(arrays["latency_model"][3], 1)
    _, out, _ = call("verify", write(tmp_path / "net.zip", {**content, name: npz(arrays)}), code=1)
    named = f"\n{name.removeprefix('run/')} is not the file that was packed\n"
    assert out.startswith("not verified: ") and named in out
    verdict = json.loads(content["verdict.json"])
    word = verdict["decisions"][0]["text"].split()[1]
    verdict["decisions"][0]["text"] = verdict["decisions"][0]["text"].replace(word, "planted", 1)
    changed = write(tmp_path / "net.zip", {**content, "verdict.json": json.dumps(verdict).encode()})
    _, out, _ = call("verify", changed, code=1)
    said = r"not verified: 1 difference\ndecisions\[0\]\.text is .*planted.*, but the samples give .*\n"
    assert re.fullmatch(said, out)


def test_missing_and_added_files_are_named(call: Any, file: Path, tmp_path: Path) -> None:
    content = members(file)
    content["run/idle/x/record.json"] = b"{}"
    left_out = next(name for name in content if name.endswith("telemetry.npz"))
    del content[left_out]
    _, out, _ = call("verify", write(tmp_path / "net.zip", content), code=1)
    assert all(f"{name} is not the file" in out for name in ("idle/x/record.json", left_out.removeprefix("run/")))


def test_packs_contain_no_folder_user_or_host_name(
    run: Path, tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are planted in every text that a pack takes from a run."""
    planted = tmp_path / "planted" / "net"
    shutil.copytree(run, planted)
    monkeypatch.setattr(platform, "node", lambda: "hostname7.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "userx9")
    texts = ["/home/userx9/my nets/a.onnx", f"{planted}/trials: userx9@hostname7", f"{Path.home()}/x", str(tmp_path)]
    for path in planted.rglob("record.json"):
        record = json.loads(path.read_text())
        record["warnings"] = [*texts, "read hostname7.example.org:/opt/secret/b.bin, 12 images/s in /conv1/Conv"]
        path.write_text(json.dumps(record))
    for path in planted.rglob("job.json"):
        job = json.loads(path.read_text())
        job["artifact"] = None
        job["trial"]["model"]["weights"] = texts[0]
        path.write_text(json.dumps(job))
    (planted / "self-test.json").write_text(json.dumps({"machine": {"host": "hostname7.example.org"}, "grade": "B"}))
    file = dyno.pack(planted, tmp_path / "planted.zip")
    every = b"\n".join(members(file).values())
    names = (b"hostname7", b"userx9", b"/home", b"/opt", str(Path.home()).encode() + b"/", str(tmp_path).encode())
    assert [name for name in names if name in every] == []
    assert b"a.onnx" in every and b"12 images/s in /conv1/Conv" in every, "what is no folder stays"
    assert dyno.verify(file).exit_code == 0
    named = dyno.pack(planted, tmp_path / "named.zip", with_names=True)
    assert json.loads(members(named)["pack.json"])["host"] == "hostname7.example.org"
    assert b"userx9" not in b"".join(members(named).values())


UUID, MAC = "GPU-5a3e8c1f-0b2d-4c6e-8f90-a1b2c3d4e5f6", "02:42:ac:11:00:02"


def test_packs_contain_no_cluster_host_or_device_id(run: Path, tmp_path: Path) -> None:
    """Cluster hosts and card identifiers are planted in JSON files and arrays."""
    planted = tmp_path / "cluster"
    shutil.copytree(run, planted)
    (planted / "placements").mkdir()
    ids = sorted(path.name for path in (planted / "trials").iterdir())
    for k, id in enumerate(ids):
        host, card = f"node{k}.lab.example", f"H100, driver 570, {UUID[:-1]}{k}"
        note = {"place": f"{host}/cuda:0", "host": host, "card": card, "trials": [id], "lost": [f"node{k} ({MAC})"]}
        (planted / "placements" / f"{k}.json").write_text(json.dumps(note))
    for path in planted.rglob("telemetry.npz"):
        arrays = dict(np.load(path))
        path.write_bytes(npz({**arrays, "gpu_name": np.asarray("H100"), "gpu_uuid": np.asarray(UUID)}))
    for path in planted.rglob("record.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"warnings": [f"node1 is slow, {UUID} {MAC}"]}))
    names = ("node0", "node1", "lab.example", MAC, UUID[4:-1])
    wide = [name.encode(code) for name in names for code in ("utf-8", "utf-32-le")]
    content = members(dyno.pack(planted, tmp_path / "cluster.zip"))
    assert [name for name in wide if name in b"\n".join(content.values())] == []
    cards = {json.loads(data)["card"] for name, data in content.items() if "/placements/" in name}
    assert len(cards) == len(ids), "two cards stay two"
    assert dyno.verify(tmp_path / "cluster.zip").exit_code == 0
    named = b"".join(members(dyno.pack(planted, tmp_path / "named.zip", with_names=True)).values())
    assert b"node0.lab.example" in named and MAC.encode() not in named and UUID[4:-1].encode() not in named


def test_packs_describe_the_measured_models(file: Path, run: Path) -> None:
    content = members(file)
    about = json.loads(content["pack.json"])
    job = json.loads(next(run.rglob("job.json")).read_text())
    expected = {key: job["trial"]["model"][key] for key in ("source", "source_sha256", "weights_sha256")}
    assert about["models"] == [expected] and about["dyno"] == dyno.__version__ and about["run"] == "net"
    assert content["run/environment.json"] == (run / "environment.json").read_bytes()
    rounds = {path.relative_to(run).as_posix() for path in run.rglob("samples.npz")}
    assert {name.removeprefix("run/") for name in content if name.endswith("samples.npz")} == rounds
    assert not [name for name in content if name.endswith((".log", ".html", ".csv", "lock"))]


@pytest.mark.parametrize("what", ["empty", "random", "truncated", "middle", "folder", "nothing", "text", "zip64"])
def test_invalid_packs_are_refused_in_one_line(refused: Any, file: Path, tmp_path: Path, what: str) -> None:
    bad, whole = tmp_path / "bad.zip", file.read_bytes()
    if what == "folder":
        bad.mkdir()
    elif what != "nothing":
        middle = len(whole) // 2
        contents = {
            "empty": b"", "text": b"hello\n" * 50, "random": np.random.default_rng(0).bytes(5000),
            "truncated": whole[:middle], "middle": whole[:middle] + b"\0" * 40 + whole[middle + 40 :],
            "zip64": whole[:-22] + b"PK\x06\x07" + b"\0" * 16 + whole[-22:],
        }  # fmt: skip
        bad.write_bytes(contents[what])
    assert re.search("is not a pack|is a damaged pack|too large for a pack", refused("verify", bad))


@pytest.mark.parametrize(
    "name",
    ["/etc/x.json", "run/../../x.json", "../x.json", "run/.x.json", "run/x.py", "run/a\\..\\b.json", "x.json",
     "run/x.pt", "run/a\x01.json", "run/\u202egnp.json/..", "run/a b.json", "run/a.json\n", "run//x.json",
     "run/nul:x.json"],
)  # fmt: skip
def test_names_outside_the_pack_are_refused(refused: Any, file: Path, tmp_path: Path, name: str) -> None:
    assert "which no pack has" in refused("verify", write(tmp_path / "bad.zip", {**members(file), name: b"{}"}))


def test_links_and_duplicate_names_are_refused(refused: Any, file: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(write(tmp_path / "link.zip", members(file)), "a") as packed:
        link = zipfile.ZipInfo("run/devices.json")
        link.external_attr = 0o120777 << 16
        packed.writestr(link, "/etc/passwd")
    assert "which no pack has" in refused("verify", tmp_path / "link.zip")
    with (
        zipfile.ZipFile(write(tmp_path / "two.zip", members(file)), "a") as packed,
        pytest.warns(UserWarning, match="Duplicate"),
    ):
        packed.writestr("pack.json", members(file)["pack.json"])
    assert "two with the same name" in refused("verify", tmp_path / "two.zip")


def test_zip_bombs_are_refused_before_unpacking(
    refused: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are counted while reading, as a member may declare a false one (the second file)."""
    large = b" " * (opening.MAX_MEMBER_BYTES[".json"] + 1)
    bomb = write(tmp_path / "bomb.zip", {**members(file), "run/models.json": large})
    assert bomb.stat().st_size < 10 << 20
    assert "models.json unpacks to too much" in refused("verify", bomb)
    content = bytearray(write(tmp_path / "lying.zip", {"run/models.json": b" " * 100_000}).read_bytes())
    for mark, place in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = content.index(mark) + place
        content[at : at + 4] = struct.pack("<I", 10)
    (tmp_path / "lying.zip").write_bytes(content)
    assert "damaged pack" in refused("verify", tmp_path / "lying.zip")
    monkeypatch.setattr(opening, "MAX_BYTES", 50_000)
    assert "too large for a pack" in refused("verify", file)
    monkeypatch.setattr(opening, "MAX_MEMBERS", 3)
    monkeypatch.setattr(opening, "MAX_BYTES", 1 << 30)
    assert "too large for a pack" in refused("verify", file)


def directory_alone(count: int) -> bytes:
    """Return a zip file with `count` empty members at the same offset."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        packed.writestr("a.npy", b"")
    whole = out.getvalue()
    at = whole.index(b"PK\x01\x02")
    entry, end = whole[at:-22], whole[-22:]
    return whole[:at] + entry * count + end[:12] + struct.pack("<I", len(entry) * count) + end[16:]


@pytest.mark.parametrize("harm", ["shape", "empty shape", "directory", "number", "nested", "array", "path", "both"])
def test_expensive_content_is_refused(refused: Any, file: Path, tmp_path: Path, harm: str) -> None:
    """Refuse values that would cost much time or memory, or crash a reader."""
    content, name, _ = samples(file)
    verdict = content["verdict.json"][1:]
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (%s), }"
    texts = {"shape": header % b"1000000000000,", "empty shape": header % b"1000000000000, 0"}
    planted = {
        "directory": {name: directory_alone(100_000)},
        "number": {"verdict.json": b'{"a": ' + b"9" * 4000 + b", " + verdict},
        "nested": {"verdict.json": b'{"a": ' + b"[" * 200 + b"]" * 200 + b", " + verdict},
        "array": {"run/study.toml": b"sizes = [" + b"1," * 5_000_000 + b"]"},
        "path": {"run/study.toml": b"a." * 30_000 + b"a = 1"},
        "both": {"run/devices.json": b"{}", "run/devices.json/x.json": b"{}"},
    }  # fmt: skip
    if text := texts.get(harm):
        raw = io.BytesIO()
        with zipfile.ZipFile(raw, "w") as inner:
            inner.writestr("latency_model.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
        planted[harm] = {name: raw.getvalue()}
    said = refused("verify", write(tmp_path / "bad.zip", {**content, **planted[harm]}))
    assert re.search("is a damaged pack|is too large for a pack", said) and len(said) < 400, said


class Harm:
    def __reduce__(self) -> Any:
        return Path("harmed").write_text, ("harm",)


def test_a_pickle_is_never_loaded(refused: Any, file: Path, tmp_path: Path) -> None:
    content, name, _ = samples(file)
    objects = npz({"latency_model": np.array([Harm()], dtype=object)}, allow_pickle=True)
    assert "never loaded" in refused("verify", write(tmp_path / "bad.zip", {**content, name: objects}))
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as inner:
        inner.writestr("latency_model.npy", pickle.dumps(Harm()))
    assert "not an array" in refused("verify", write(tmp_path / "bad2.zip", {**content, name: raw.getvalue()}))
    assert not Path("harmed").exists()


@pytest.mark.parametrize("harm", ["deep", "list", "text", "numbers", "schema", "format", "no verdict", "no trials"])
def test_damaged_content_is_refused_in_one_line(refused: Any, file: Path, tmp_path: Path, harm: str) -> None:
    content = members(file)
    about = json.loads(content["pack.json"])
    job = next(name for name in content if name.endswith("job.json"))
    planted: dict[str, dict[str, bytes]] = {
        "deep": {"run/models.json": b'{"a":' + b"[" * 100_000}, "list": {job: b"[]"},
        "text": {"verdict.json": b"\xff\xfe"}, "numbers": {"verdict.json": b"[1, 2"},
        "schema": {"pack.json": json.dumps({**about, "schema": 99}).encode()},
        "format": {"pack.json": json.dumps({**about, "format": "other"}).encode()},
    }  # fmt: skip
    content |= planted.get(harm, {})
    if harm == "no verdict":
        del content["verdict.json"]
    if harm == "no trials":
        content = {name: data for name, data in content.items() if "/trials/" not in name}
    said = refused("verify", write(tmp_path / "bad.zip", content))
    assert "schema 99" in said if harm == "schema" else re.search("is not a pack|is a damaged pack", said)


def test_invalid_pack_requests_are_refused(refused: Any, tmp_path: Path, run: Path) -> None:
    assert "not a folder" in refused("pack", tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "not a run folder" in refused("pack", tmp_path / "empty")
    assert "is a folder" in refused("pack", run, "-o", tmp_path / "empty")
    assert "net.pack must end in .zip" in refused("pack", run, "-o", "net.pack"), "a site would leave it out"


@pytest.mark.parametrize("place", ["backend", "task", "study"])
def test_code_named_by_a_pack_is_not_imported(refused: Any, file: Path, importable: Any, place: str) -> None:
    """Backends and tasks may be named MODULE:NAME; `dyno run` imports these."""
    folder = importable("planted_module", "from pathlib import Path\nPath('imported').write_text('x')\nX = 1\n")
    content = members(file)
    if place == "study":
        content["run/study.toml"] += b'task = "planted_module:X"\n'
    for name in content:
        if name.endswith("job.json") and place != "study":
            job = json.loads(content[name])
            (job["trial"] if place == "backend" else job["trial"]["model"])[place] = "planted_module:X"
            content[name] = json.dumps(job).encode()
    bad = write(folder / "bad.zip", content)
    for words in (["verify", bad], ["reproduce", bad, "-y"]):
        assert "names code in Python, 'planted_module:X'" in refused(*words)
    assert not Path("imported").exists()
