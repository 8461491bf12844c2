"""The report: one complete page that works offline, escapes names, describes its method and fits a phone."""

import base64
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image, ImageStat

import printed
import synthetic
from browser import ask, browse
from dyno.report import charts, report, sections, tables
from dyno.report.report import ChartDrawing, keep_leading
from dyno.report.tables import trial_table
from dyno.report.verdict import verdict
from dyno.results.run_data import RunData
from dyno.results.trial_result import Results, load_run
from dyno.worker.record import read_json, write_json
from dyno.worker.spec import UserError
from synthetic import Way
from synthetic_card import Card


class Page(HTMLParser):
    """Tags, attributes and text of a page, parsed as by a browser."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def written(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write_report([trial_table.read_trials(demo)], tmp_path_factory.mktemp("report"))


def test_the_page_is_whole_and_in_order(written: Path, demo: Results) -> None:
    page, run = Page(written), trial_table.read_trials(demo)
    parts = re.findall(r'<details class="part[^>]*><summary>([^<:]*)', written.read_text())
    assert parts == ["Tables", "Charts", "Warnings and failures", "Every trial", "How this run was measured",
                     "Machine", "How to reproduce"]  # fmt: skip
    for expected in ("Fastest is openvino int8", "Synthetic CPU", "killed by SIGSEGV", "rank 10", "narrow enough",
                     "close, % (rtol 0.001, atol 1e-08)", "another process used 40 % of a core",
                     "onnx_export: onnx fp32 in 900 ms", 'models = ["digits"]', "20 int8, 1 fp32"):  # fmt: skip
        assert expected in page.text, expected
    # A drawing per chart, plus one of the smallest batch above the tables and a narrow one for phones.
    assert page.tags.count("svg") == len(printed.drawn(run)) + 2
    assert set(keep_leading(run).frame["batch"]) == {1} < set(run.frame["batch"])
    assert "At the smallest batch;" in written.read_text().split("Trials</h2>")[0]
    assert page.tags.index("svg") < page.tags.index("table")
    kinds = {kind.name: kind for kind in tables.list_kinds()}
    others = [t for name, t in printed.every(run).items() if kinds[name].section and name != "trials"]
    choices = sum(len(list(table.parts())) for table in others) + len(printed.drawn(run)) + len(demo.trials)
    assert page.tags.count("select") == 3 and page.tags.count("option") == choices
    folded = sum(bool(decision.findings) for decision in verdict.read_verdict(run).decisions) + 1  # and the run's
    folded += sum(len(cause.trials) > 2 for cause in sections.list_complaints(demo))
    assert page.tags.count("details") == folded + len(parts)
    assert page.text.index("Fastest is") < page.text.index("inputs already where the engine reads them")


@pytest.mark.slow
def test_missing_libraries_are_reported_before_writing(
    demo: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match=r"needs jinja2, not installed here; pip install 'inference-dyno\[report\]'"):
        report.write_report([trial_table.read_trials(demo)], tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_the_card_has_the_winners_figures(written: Path, demo: Results) -> None:
    (card, *_) = verdict.read_verdict(trial_table.read_trials(demo)).decisions
    figures = {f.name: f for f in card.figures}
    assert list(figures) == ["latency", "speed-up", "how sure", "accuracy", "cost"]
    row = (
        trial_table.read_trials(demo)
        .frame.query("backend == 'openvino' and precision == 'int8' and batch == 1")
        .iloc[0]
    )
    assert figures["speed-up"].value == f"{row['speedup']:.2f}x" and "pytorch fp32" in figures["speed-up"].below
    assert figures["how sure"].value == "decided" and f"{row['rounds']} rounds" in figures["how sure"].below
    assert figures["accuracy"].value == f"{row['top1']:.2f} %"
    text = Page(written).text
    assert all(f.value in text and f.below in text for f in figures.values())


@pytest.mark.slow
def test_the_page_is_self_contained(written: Path, demo: Results) -> None:
    page = Page(written)
    assert not {"link", "img", "iframe", "object", "base"} & set(page.tags)
    assert not [v for name, v in page.attributes if name in ("src", "srcset", "action", "formaction")]
    links = [v for name, v in page.attributes if name in ("href", "xlink:href") and not v.startswith("#")]
    (table,) = [v for v in links if v.startswith("data:text/csv")]
    stored = (written.parent / "results.csv").read_bytes()
    assert base64.b64decode(table.partition("base64,")[2]) == stored
    folders = [(written.parent / v).resolve() for v in links if v != table]
    assert folders == [(demo.folder / "trials" / t.id).resolve() for t in demo.trials]
    ids = [v for name, v in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert written.stat().st_size < 1_000_000


@pytest.mark.slow
def test_warnings_that_differ_only_in_numbers_are_merged(tmp_path: Path) -> None:
    ways = [Way(name, warnings=(f"another process used {i} % of a core",)) for i, name in enumerate("abc", 30)]
    results = trial_table.read_trials(synthetic.write_run(tmp_path / "r", ways, samples=3, count=2)).records
    (line,) = [each for each in sections.list_complaints(results) if "another process" in each.text]
    assert line.text == "another process used 30 % of a core; other trials in other numbers"
    assert line.trials == [t.label for t in results]


@pytest.mark.slow
def test_charts_and_csv_are_written_next_to_the_page(written: Path, demo: Results) -> None:
    names = {p.name for p in (written.parent / "charts").iterdir()}
    assert {"latency.png", "speedup.png", "accuracy-latency.png", "throughput-batch.png"} <= names
    assert len(pd.read_csv(written.parent / "results.csv")) == len(demo.trials)


def test_every_name_is_escaped(hostile_names: Results, tmp_path: Path) -> None:
    page = Page(report.write_report([trial_table.read_trials(hostile_names)], tmp_path))
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert "b" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "модель" in page.text
    assert '<script>alert("x")</script>' in page.text
    assert "<img src=x onerror=alert(1)> | нет" in page.text


def test_several_runs_are_sections_of_one_page(demo: Results, hostile_names: Results, tmp_path: Path) -> None:
    page = Page(report.write_report([trial_table.read_trials(demo), trial_table.read_trials(hostile_names)], tmp_path))
    ids = [v for name, v in page.attributes if name == "id"]
    assert {"run1", "run2", "run2-tables"} <= set(ids)
    assert "2 runs" in page.text and "dyno compare A B" in page.text
    assert len(ids) == len(set(ids))
    assert pd.read_csv(tmp_path / "results.csv")["run"].unique().tolist() == ["demo", "hostile"]
    assert (tmp_path / "charts" / "hostile-latency.png").exists()


def test_with_several_models_each_decision_is_a_foldable_line(tmp_path: Path) -> None:
    ways = [
        Way(backend, "fp32", seconds, model=model, spread=spread, statuses=("ok",) * 2, batch=batch)
        for model in ("one", "two", "three")
        for backend, seconds, spread in (("pytorch", 0.01, 3.0), ("a", 0.001, 0.01)) for batch in (1, 4)
    ]  # fmt: skip
    run = trial_table.read_trials(synthetic.write_run(tmp_path / "run", ways, samples=10, count=5))
    text = report.write_report([run], tmp_path / "page").read_text(encoding="utf-8")
    assert text.count('<details class="decision') == 6 and '<div class="decision' not in text
    first = text[text.index("<figure") : text.index("</figcaption>")]
    assert "latency per batch" in first.lower() and "At the smallest batch" in first  # no speed-up there is bounded


@pytest.mark.slow
def test_counts_of_problems_link_to_their_list(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    links = re.findall(r'<a href="#(run1-problems)">([^<]*)</a>', text)
    assert any("warnings; the report lists them" in said for _, said in links)
    assert any("did not finish" in said for _, said in links) and 'id="run1-problems"' in text


@pytest.mark.slow
def test_a_phone_shows_the_verdict_unscrolled_with_readable_charts(written: Path, tmp_path: Path) -> None:
    script = """
      const frame = document.createElement("iframe");
      frame.style.width = "420px";
      frame.srcdoc = "<!doctype html>" + document.documentElement.outerHTML.replaceAll("<script", "<template");
      frame.onload = () => {
        const page = frame.contentDocument, drawn = [...page.querySelectorAll(".chart svg text")];
        const heads = [...page.querySelectorAll("table.sortable th")];
        const end = name => heads.find(h => h.textContent.trim() === name).getBoundingClientRect().right;
        const letters = Math.min(...heads.map(h => parseFloat(getComputedStyle(h).fontSize)));
        const size = text => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a;
        const seen = drawn.filter(text => text.getBoundingClientRect().width);
        const right = Math.max(...[...page.querySelectorAll(".decision *")].map(e => e.getBoundingClientRect().right));
        say({speedup: end("speed-up"), verdict: end("verdict"), accuracy: end("top-1 %"), letters,
             count: seen.length, least: Math.min(...seen.map(size)), right});
      };
      document.body.append(frame);"""
    found = ask(written, script, tmp_path / "probe.html", "--virtual-time-budget=5000")
    assert 0 < found["speedup"] < found["verdict"] < found["accuracy"] <= 420 and found["letters"] >= 12
    assert found["count"] > 10 and found["least"] >= 11.9
    assert found["right"] <= 420, "the verdict is whole"


@pytest.mark.slow
def test_columns_and_tables_can_be_chosen(written: Path, tmp_path: Path) -> None:
    script = """
      const table = document.querySelector("table.sortable"), found = {};
      const heads = () => [...table.tHead.rows[0].cells].filter(h => !h.hidden).map(h => h.textContent);
      found.first = heads();
      const box = [...document.querySelectorAll(".picker label")].find(l => l.textContent.trim() === "size MB");
      box.querySelector("input").click();
      found.picked = heads();
      found.beyond = table.closest(".box").scrollWidth - table.closest(".box").clientWidth;
      found.bold = [...document.querySelectorAll("tr.first")].map(r => r.cells[0].textContent + r.cells[1].textContent);
      const select = document.querySelector("select[aria-label=table]");
      const shown = () => [...select.parentElement.querySelectorAll(":scope > .panel")].map(p => !p.hidden);
      select.selectedIndex = 3;
      select.dispatchEvent(new Event("change"));
      found.panels = shown();
      for (const each of document.querySelectorAll("details")) each.open = true;
      found.height = document.documentElement.scrollHeight;
      say(found);"""
    found = ask(written, script, tmp_path / "probe.html", "--window-size=1300,900")
    assert len(found["first"]) == 8 and found["picked"] == [*found["first"], "size MB"]
    assert found["beyond"] == 0, "the table fits"
    assert found["height"] < 7000, "all is unfolded, with twenty trials"
    assert found["bold"] == ["openvinoint8", "openvinoint8"]
    assert found["panels"].index(True) == 3 and sum(found["panels"]) == 1


def test_runs_with_one_name_are_distinguishable(tmp_path: Path) -> None:
    folders = [synthetic.write_run(tmp_path / name / "run", [Way("pytorch")], samples=5) for name in ("new", "old")]
    runs = [trial_table.read_trials(folder) for folder in folders]
    page = Page(report.write_report(runs, tmp_path / "page"))
    assert "new/run" in page.text and "old/run" in page.text
    assert pd.read_csv(tmp_path / "page" / "results.csv")["run"].unique().tolist() == ["new/run", "old/run"]
    assert all((tmp_path / "page" / "tables" / f"{name}_run-trials.csv").is_file() for name in ("new", "old"))
    assert (tmp_path / "page" / "charts" / "old_run-latency.png").is_file()
    with pytest.raises(UserError, match="a run is named twice"):
        report.write_report([runs[0], runs[0]], tmp_path / "page")


def test_a_gpu_run_names_its_gpu(tmp_path: Path) -> None:
    run = synthetic.write_run(tmp_path / "run", [Way("pytorch", card=Card()), Way("tensorrt", card=Card(gap=0.002))])
    assert "Synthetic GPU, driver 1" in sections.about_run(load_run(run))
    page = Page(report.write_report([trial_table.read_trials(run)], tmp_path / "report"))
    assert page.text.count("Synthetic GPU, driver 1") == 2, "under the card, and among the machine's facts"


def test_a_run_without_successful_trials_has_a_page(tmp_path: Path) -> None:
    run = synthetic.write_run(tmp_path / "run", [Way("x", statuses=("failed",), reason="out of luck")])
    (run / "environment.json").unlink()
    (run / "study.toml").unlink()
    text = Page(report.write_report([trial_table.read_trials(run)], tmp_path / "out")).text
    for expected in ("No trial succeeded", "out of luck", "Not recorded", "was not stored"):
        assert expected in text
    assert "0 more" not in text and "Accuracy and agreement" not in text, "what is empty has no fold"


def test_an_unwritable_folder_is_reported_in_one_line(demo: Results, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"can't be written to .*; give another folder"):
        report.write_report([trial_table.read_trials(demo)], tmp_path / "file")


@pytest.mark.slow
def test_a_browser_sorts_the_tables_and_a_narrow_one_never_scrolls_sideways(written: Path, tmp_path: Path) -> None:
    script = """
      const table = document.querySelector("table.sortable"), said = [];
      const shown = row => row.cells[0].textContent + row.cells[2].textContent;
      const order = () => [...table.tBodies[0].rows].map(shown).join(" ");
      for (const name of ["latency ms", "latency ms", "backend"]) {
        [...table.tHead.rows[0].cells].find(h => h.textContent === name).querySelector("button").click();
        said.push(order());
      }
      const wide = document.documentElement.scrollWidth - window.innerWidth;
      say({said, wide, rules: document.styleSheets[0].cssRules.length});"""
    found = ask(written, script, tmp_path / "probe.html", "--window-size=500,900")
    up, down, names = found["said"]
    assert up.startswith("openvino0.816 openvino1.22 openvino1.83")
    assert up.endswith("fake fake tensorrt")  # rows without a number stay last
    assert down.startswith("fake5.14 pytorch4.05")
    assert down.endswith("fake fake tensorrt")
    assert names.startswith("compile")
    assert found["wide"] == 0 and found["rules"] > 20


@pytest.mark.slow
def test_a_browser_filters_copies_zooms_and_opens_link_targets(written: Path, tmp_path: Path) -> None:
    script = """
      const rows = [...document.querySelectorAll("section .table tbody tr")].filter(row => !row.closest(".trial"));
      const visible = () => rows.filter(row => !row.hidden);
      const type = text => { words.value = text; words.dispatchEvent(new Event("input")); return visible(); };
      const found = {};
      found.all = type("").length;
      found.int8 = type("INT8 batch 1").map(r => r.textContent);
      found.count = count.textContent;
      const first = document.querySelector("table.sortable");
      found.markdown = asMarkdown(first);
      type("");
      [...document.querySelectorAll("button.tool")].find(b => b.textContent === "zoom").click();
      found.zoomed = document.querySelectorAll(".svg-pan-zoom_viewport").length;
      const part = document.querySelector("details.part");
      location.hash = part.id;
      follow();
      found.open = part.open;
      found.tips = [...document.querySelectorAll("svg title")].map(t => t.textContent);
      say(found);"""
    found = ask(written, script, tmp_path / "probe.html")
    assert all("int8" in row for row in found["int8"]) and 0 < len(found["int8"]) < found["all"]
    assert re.fullmatch(r"\d+ of \d+ rows", found["count"])
    head, rule, *rows = found["markdown"].splitlines()
    assert (
        head.startswith("| backend | precision | latency ms |")
        and "size MB" not in head
        and rule.startswith("| --- | --- | ---: |")
    )
    assert rows and all("| int8" in row for row in rows)
    assert found["zoomed"] == 1 and found["open"]
    assert any(tip.startswith("openvino int8, batch 1: ") and "images/s" in tip for tip in found["tips"])


@pytest.mark.slow
def test_printing_unfolds_all_tables_and_folds_them_again(written: Path, tmp_path: Path) -> None:
    probe = """
      const open = () => all("details:not(.picker)").map(each => each.open), before = open();
      dispatchEvent(new Event("beforeprint"));
      dispatchEvent(new Event("beforeprint"));
      const printed = open();
      dispatchEvent(new Event("afterprint"));
      say({before, printed, after: open()});
    """
    found = ask(written, probe, tmp_path / "probe.html")
    assert not all(found["before"]) and all(found["printed"]) and found["after"] == found["before"]


@pytest.mark.slow
def test_printed_pages_are_white_and_not_cut(written: Path, tmp_path: Path) -> None:
    printed_page = tmp_path / "printed.html"
    text = written.read_text(encoding="utf-8")
    assert text.count("@media print") == 1
    printed_page.write_text(text.replace("@media print", "@media all"), encoding="utf-8")
    script = """
      dispatchEvent(new Event("beforeprint"));
      const style = element => getComputedStyle(element), parts = all("details.part");
      say({page: style(document.body).backgroundColor, tools: style(document.querySelector(".tools")).display,
           cut: all("main *").filter(e => e.scrollWidth > e.clientWidth + 1 && style(e).overflowX !== "visible").length,
           right: Math.max(...all("main *").map(e => e.getBoundingClientRect().right)), width: innerWidth,
           shown: parts.filter(e => e.getClientRects().length).map(e => e.querySelector("summary").textContent)});"""
    found = ask(
        printed_page,
        script,
        tmp_path / "probe.html",
        "--window-size=760,900",
        "--blink-settings=preferredColorScheme=0",
    )
    assert found["page"] == "rgb(255, 255, 255)" and found["tools"] == "none"
    assert found["cut"] == 0 and found["right"] <= found["width"]
    assert "Machine" in found["shown"] and "Every trial: layers, rounds, build steps, logs" not in found["shown"]


def brightness(image: Image.Image) -> float:
    """Return a picture's mean brightness, 0 to 255."""
    return float(ImageStat.Stat(image.convert("L")).mean[0])


@pytest.mark.slow
def test_a_screenshot_shows_the_report(written: Path, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    browse(written, "--window-size=1280,6400", f"--screenshot={shot}")
    with Image.open(shot) as image:
        assert image.size == (1280, 6400)
        colours = {c for _, c in image.convert("RGB").getcolors(1 << 22)}
    assert {(0, 158, 115), (230, 159, 0)} <= colours  # points of OpenVINO and ONNX Runtime are drawn
    dark = tmp_path / "dark.png"
    browse(written, "--blink-settings=preferredColorScheme=0", f"--screenshot={dark}")
    with Image.open(shot) as bright, Image.open(dark) as dim:
        assert brightness(dim) < 60 < 200 < brightness(bright)


DRAW, HERE = report._draw_kind, os.getpid()


@pytest.fixture
def demo_run(demo: Results, monkeypatch: pytest.MonkeyPatch) -> RunData:
    monkeypatch.setattr(report, "MIN_PARALLEL_TRIALS", 2)
    few = charts.list_charts()[:3]
    monkeypatch.setattr(charts, "list_charts", lambda: few)
    return trial_table.read_trials(demo)


def pictures(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


def dies(demo_run: RunData, folder: Path, prefix: str, name: str, number: int) -> ChartDrawing | None:
    if os.getpid() != HERE:
        (folder.parent / "died").touch()
        os._exit(9)
    return DRAW(demo_run, folder, prefix, name, number)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_parallel_drawing_gives_the_same_charts(
    demo_run: RunData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = report.draw_charts(demo_run, folder(tmp_path, "several"), "r0", "")
    monkeypatch.setattr(report, "_draw_kind", dies)
    after_a_death = report.draw_charts(demo_run, folder(tmp_path, "death"), "r0", "")
    assert (tmp_path / "died").exists()
    monkeypatch.setattr(report, "MIN_PARALLEL_TRIALS", 1_000)
    alone = report.draw_charts(demo_run, folder(tmp_path, "alone"), "r0", "")
    assert len(alone) == 3
    for other, name in ((several, "several"), (after_a_death, "death")):
        assert [(one.name, one.caption) for one in other] == [(one.name, one.caption) for one in alone]
        assert pictures(tmp_path / name) == pictures(tmp_path / "alone")


def described(folder: Path, study: str = "") -> dict[str, str]:
    (folder / "study.toml").write_text(f'models = ["digits"]\n{study}', encoding="utf-8")
    return dict(sections.list_terms(trial_table.read_trials(folder)))


def taking_turns(folder: Path, *backends: str) -> Path:
    """Write a run whose trials of these backends are interleaved, in four blocks of 0.1 s."""
    synthetic.write_run(folder, [Way("pytorch"), Way("a", seconds=0.005), Way("b", seconds=0.006)], samples=20)
    for path in folder.glob("trials/*/r*/record.json"):
        job = read_json(path.parent / "job.json")
        if job["trial"]["backend"] not in backends:
            continue
        job["trial"]["plan"] |= {"blocks": 4, "block_s": 0.1}
        write_json(path.parent / "job.json", job)
        arrays = dict(np.load(path.parent / "samples.npz"))
        np.savez(path.parent / "samples.npz", **arrays, latency_model_block=np.repeat(np.arange(4, dtype=np.int32), 5))
        record = read_json(path)
        write_json(path, {**record, "facts": {**record["facts"], "turns": {"set": path.parent.name}}})
    return folder


def test_sequential_measurement_is_described(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", [Way("pytorch"), Way("a"), Way("b")], samples=20)
    terms = described(folder, "equivalent = 3.0\n")
    assert terms["rounds"].startswith("3, each in a fresh process")
    assert terms["reference"] == "pytorch fp32" and terms["compared"].startswith("one after the other")
    assert terms["interval"].startswith("Welch's t interval")
    assert terms["equivalent"] == "the whole interval is within ±3 %"
    assert terms["family"].startswith("up to 2 rows against one reference are judged together (Holm)")
    assert terms["looks"].startswith("one, after the last round")
    assert (
        "2 threads" in terms["level: a latency is of"] and "alone from start to end" in terms["level: a latency is of"]
    )


def test_interleaved_measurement_is_described(tmp_path: Path) -> None:
    terms = described(taking_turns(tmp_path / "run", "pytorch", "a", "b"))
    assert terms["compared"].startswith("in turns:") and "a block of 0.1 s" in terms["compared"]
    assert "one after the other" not in terms["compared"] and terms["interval"].startswith("Student's t interval")
    assert terms["sampling ends"].startswith("after 4 blocks per boundary")
    assert "a loop alone may be faster" in terms["level: a latency is of"]


def test_partly_interleaved_measurement_is_described(tmp_path: Path) -> None:
    terms = described(taking_turns(tmp_path / "run", "pytorch", "a"))
    assert terms["compared"].startswith("in turns:") and terms["compared"].endswith("; 1 pair one after the other")
    assert terms["interval"].startswith("of pairs ") and "Student" in terms["interval"] and "Welch" in terms["interval"]


def test_until_decided_counts_its_looks(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", [Way("pytorch"), Way("a")], samples=20)
    terms = described(folder, 'until = "decided"\nrounds = 2\n')
    assert terms["looks"].startswith("until decided: 2, after round 2 and each further one")
    assert terms["family"].startswith("one row at most is judged")


def test_a_single_trial_is_described_as_not_compared(tmp_path: Path) -> None:
    terms = described(synthetic.write_run(tmp_path / "run", [Way("a")], samples=20))
    assert terms["compared"].startswith("nothing:") and "interval" not in terms
