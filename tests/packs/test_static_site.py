"""`dyno site`: packs, untrusted ones included, as a static site that opens from disk."""

import json
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import browser
import dyno
import synthetic
from dyno.packs import static_site

GOLDEN = Path(__file__).parents[1] / "golden" / "run"
PLANTED = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of packs: a good run, hostile names, a changed verdict, a zip bomb's name, a text file."""
    folder = tmp_path_factory.mktemp("packs")
    good = dyno.pack(GOLDEN, folder / "golden.pack.zip")
    hostile = synthetic.write_run(tmp_path_factory.mktemp("runs") / "hostile", synthetic.hostile())
    dyno.pack(hostile, folder / "<b>&hostile.pack.zip")
    with zipfile.ZipFile(good) as packed, zipfile.ZipFile(folder / "...pack.zip", "w") as changed:
        for info in packed.infolist():
            data = packed.read(info)
            if info.filename == "verdict.json":
                verdict = json.loads(data)
                verdict["decisions"][0]["text"] = PLANTED
                data = json.dumps(verdict).encode()
            if info.filename == "run/environment.json":
                data = json.dumps({**json.loads(data), "cpu": PLANTED, "gpu": ""}).encode()
            changed.writestr(info.filename, data)
    (folder / "text.pack.zip").write_text(PLANTED)
    with zipfile.ZipFile(folder / "path.pack.zip", "w") as packed:
        packed.writestr("../../planted", PLANTED)
    return folder


def test_a_site_is_built_from_untrusted_packs(call: Any, packs: Path) -> None:
    _, out, err = call("site", packs, "-o", "site", code=3)
    assert out == "site/index.html\n"
    index = Path("site/index.html").read_text()
    assert PLANTED not in index and "<b>" not in index and "&lt;b&gt;&amp;hostile" in index
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", index) if "<td" in row]
    heads = re.findall(r"<th[^>]*>.*?<button[^>]*>(.*?)</button>", index)
    rows = {re.sub("<.*?>", "", row[0]): dict(zip(heads, row, strict=True)) for row in cells}
    assert [*rows] == [
        "...pack.zip",
        "&lt;b&gt;&amp;hostile.pack.zip",
        "golden.pack.zip",
        "path.pack.zip",
        "text.pack.zip",
    ]
    golden = rows["golden.pack.zip"]
    shown = json.loads(call("show", GOLDEN, "--format", "json", code=0)[1])
    trials = {row["trial"]: row for row in shown["tables"]["trials"]["rows"]}
    winners = [trials[id] for id in shown["decisions"][0]["candidates"]]
    assert golden["verified"] == "yes" and golden["certainty"] == shown["decisions"][0]["certainty"]
    assert golden["date"] and all(f"{w['backend']} {w['precision']}" in golden["fastest"] for w in winners)
    with zipfile.ZipFile(packs / "<b>&hostile.pack.zip") as packed:
        verdict = json.loads(packed.read("verdict.json"))
    (winner,) = (row for row in verdict["rows"] if row["trial"] == verdict["decisions"][0]["candidates"][0])
    limits = ", ".join(f"{winner[name]:.2f}" for name in ("speedup_low", "speedup_high"))
    assert rows["&lt;b&gt;&amp;hostile.pack.zip"]["speed-up"] == f"{winner['speedup']:.2f}x [{limits}]"
    assert rows["...pack.zip"]["verified"] == "no: environment.json is not the file that was packed"
    assert rows["text.pack.zip"]["verified"].startswith("no; it is not a pack")
    assert "holds" in rows["path.pack.zip"]["verified"]
    assert err.count("\n") == 2 and "text.pack.zip: " in err and "path.pack.zip: " in err
    linked = [unquote(link) for link in re.findall(r'<td[^>]*><a href="(.*?)">', index)]
    assert len(linked) == len(set(linked)) == 3
    for link in linked:
        page = Path("site", link).resolve()
        assert page.is_relative_to(Path("site").resolve()), "no name of a pack leads out of the site"
        text = page.read_text()
        assert PLANTED not in text and not re.search(r"""(src|href)=["']?(https?:)?//""", text)
        assert "/tmp" not in text, "it doesn't name the folder into which the pack was opened"
    assert not list(Path().glob("**/planted"))


def test_the_site_in_a_browser(call: Any, packs: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    few.mkdir()
    for path in packs.glob("*.zip"):
        if path.name != "golden.pack.zip":
            shutil.copy(path, few)
    call("site", few, "-o", "site", code=3)
    script = (
        'say([document.querySelectorAll("tbody tr").length, document.querySelectorAll("main script, td b").length, '
        'document.querySelector(".box").scrollWidth - document.querySelector(".box").clientWidth])'
    )
    for width in (1400, 800):
        window, probe = f"--window-size={width},1000", tmp_path / "site" / "probe.html"
        assert browser.ask(Path("site/index.html").resolve(), script, probe, window) == [4, 0, 0]


def test_too_few_or_too_many_packs_are_refused(
    refused: Any, tmp_path: Path, packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "has 0 packs; give a folder of 1 to 1,000 files of `dyno pack`" in refused("site", tmp_path / "nowhere")
    with pytest.raises(dyno.UserError, match="has 0 packs"):
        dyno.write_site(tmp_path, tmp_path / "site")
    monkeypatch.setattr(static_site, "MAX_PACKS", 2)
    assert "has 5 packs" in refused("site", packs)


def test_reports_have_distinct_names() -> None:
    files = [
        Path(name) for name in ("A-2.pack.zip", "A.pack.zip", "a.pack.zip", "..pack.zip", "?.zip", "!.zip", "...zip")
    ]
    names = [*static_site._name_reports(files)]
    assert names[:4] == ["a-2", "a", "a-3", "pack"] and len({*names}) == len(files)
    assert all(name.strip(".") == name and "/" not in name for name in names)


def test_undecodable_names_are_shown(call: Any, tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / os.fsdecode(b"a\xff.zip")).write_text("no pack")
    _, _, err = call("site", "odd", "-o", "site", code=3)
    assert err == "dyno: left out: a .zip: it is not a pack; give a file that `dyno pack` wrote\n"
    assert ">a .zip</td>" in Path("site/index.html").read_text()
