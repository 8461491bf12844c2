"""`dyno site`: a folder of packs as a static site, with a table of their verdicts and a report of each.

Packs are untrusted: their content is never executed and always escaped, and a broken pack is a row.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from dyno.formatting import format_moment, format_ratio
from dyno.packs.card import PACK_SUFFIX
from dyno.packs.opening import open_pack
from dyno.packs.verification import read_results, verify_opened
from dyno.report.export import make_page, page_part
from dyno.report.report import file_name, list_missing, write_report
from dyno.report.verdict.verdict import read_start, read_verdict
from dyno.results.ranking import describe_configuration
from dyno.results.run_data import RunData
from dyno.results.trial_result import load_run
from dyno.store import check_writable
from dyno.table import LINK_KEY, TEXT, Column, Row, Table, is_missing
from dyno.worker.extras import name_lacking
from dyno.worker.option_values import check_types
from dyno.worker.record import refuse_links, write_text
from dyno.worker.spec import UserError, clean_text, shorten

INDEX_PAGE, REPORTS_DIR = "index.html", "packs"
JOB_FOLDER_LINK = re.compile(r" · its jobs[^<]*<a [^>]*>[^<]*</a>")  # link to the unpacked folder, which is temporary
MAX_PACKS, MAX_TRIALS = 1000, 500  # packs per site; trials of a run with a report
COLUMNS = (
    Column("pack", "file, which links to its report", kind=TEXT),
    Column(
        "verified", "whether the verdict follows from the samples, computed again here", kind=TEXT,
        cell=lambda row: "; ".join(row[name] for name in ("verified", "problem") if row.get(name)),
    ),
    Column("model", "of the first decision, with its size where there are several", kind=TEXT),
    Column("fastest", "the winner, or what may be", kind=TEXT),
    Column("speedup", "over the reference, with its 95 % interval", "x", kind=TEXT, title="speed-up"),
    Column("certainty", "how sure the verdict is", kind=TEXT),
    Column("precision", "of the fastest", kind=TEXT, rank=1),
    Column("machine", "graphics card, else processor", kind=TEXT, rank=1),
    Column("date", "start of the run's first job", kind=TEXT, rank=1),
)  # fmt: skip
SITE_NOTE = "Each verdict was computed again from its pack's samples. It holds on the pack's machine."


def write_site(packs: str | Path, out: str | Path) -> Table:
    """Write OUT/index.html with a row per pack in a folder, and a report per readable pack; return the table.

    `problem` is the reason for a missing verdict or report. Raises `UserError` for a folder without packs.
    """
    check_types({"packs": packs, "out": out}, dict.fromkeys(("packs", "out"), str | Path))
    packs, out = Path(packs), Path(out)
    if libraries := list_missing():
        raise UserError(name_lacking(libraries))
    files = sorted(path for path in packs.glob("*.zip") if path.is_file()) if packs.is_dir() else []
    if not files or len(files) > MAX_PACKS:
        raise UserError(f"{packs} has {len(files):,} packs; give a folder of 1 to {MAX_PACKS:,} files of `dyno pack`")
    check_writable(out / INDEX_PAGE, parents=True)
    refuse_links(out, (REPORTS_DIR,))
    out.mkdir(parents=True, exist_ok=True)
    rows = [_read_pack(file, out / REPORTS_DIR / name) for file, name in zip(files, _name_reports(files), strict=True)]
    table = Table("site", "Results", "A row for each pack.", COLUMNS, rows, notes=(SITE_NOTE,))
    body = "".join(page_part(table, part, heading="") for part in table.parts())
    write_text(out / INDEX_PAGE, make_page(table.title, f'<div class="folded">{body}</div>'))
    return table


def _name_reports(files: list[Path]) -> Iterator[str]:
    """Yield a unique folder name of plain characters for each pack."""
    used_names: set[str] = set()
    for file in files:
        base = file_name(file.name.removesuffix(PACK_SUFFIX)).strip(".").lower() or "pack"
        names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
        name = next(each for each in names if each not in used_names)
        used_names.add(name)
        yield name


def _read_pack(file: Path, folder: Path) -> Row:
    row: Row = {"pack": clean_text(shorten(file.name))}
    try:
        with open_pack(file) as pack:
            verification = verify_opened(pack, file)
            row["verified"] = f"no: {verification.differences[0]}" if verification.differences else "yes"
            run_folder = pack.run.rename(pack.run.with_name(folder.name))  # the report takes its title from the folder
            run = read_results(load_run(run_folder))
            row |= _describe_run(run)
            if len(run.frame) > MAX_TRIALS:
                return row | {"problem": f"too large for a report: more than {MAX_TRIALS} trials"}
            page = write_report([run], folder)
            for path in (page, *folder.rglob("*.md"), *folder.rglob("*.csv")):
                text = path.read_text(encoding="utf-8").replace(f"{run_folder.parent}/", "")
                write_text(path, JOB_FOLDER_LINK.sub("", text))
            return row | {LINK_KEY: quote(f"{REPORTS_DIR}/{folder.name}/{page.name}")}
    except UserError as e:
        return {"verified": "no", **row, "problem": clean_text(str(e).replace(str(file), "it"))}
    except Exception as e:  # the values of a pack may be anything
        return {"verified": "no", **row, "problem": f"it can't be shown ({type(e).__name__})"}


def _describe_run(run: RunData) -> Row:
    environment, decisions = run.records.environment, read_verdict(run).decisions
    row: Row = {
        "machine": str(environment.get("gpu") or environment.get("cpu") or ""),
        "date": format_moment(read_start(run.records)),
    }
    if not decisions:
        return row | {"problem": "it has no decision"}
    decision, trials = decisions[0], run.frame.set_index("trial")
    rows = [trials.loc[id] for id in decision.candidates]
    suffix = f" and {len(decisions) - 1} more" if len(decisions) > 1 else ""
    row |= {"model": (decision.where or str(run.frame["model"].iloc[0])) + suffix, "certainty": decision.badge}
    row |= {"fastest": " or ".join(map(describe_configuration, rows)) or "none"}
    row |= {"precision": ", ".join(dict.fromkeys(str(each["precision"]) for each in rows))}
    if len(rows) == 1 and not is_missing(rows[0]["speedup"]) and rows[0].name != rows[0]["reference"]:
        row |= {"speedup": format_ratio(*(rows[0][name] for name in ("speedup", "speedup_low", "speedup_high")))}
    return row
