"""Which networks run where: every network on every backend in every precision, one short round each, as one table.

    python benchmarks/matrix.py OUT [--backend pytorch,onnxruntime,openvino] [--precision fp32,fp16,int8]
        [--networks torchvision:resnet18,timm:levit_128s] [--device cuda:0] [--python tensorrt=PATH] [--limit 900]
        [--batch 1,8,64] [--rounds 3] [--jobs 6] [--minutes 9] [--one-cache]

Weights are random, inputs are crops of scikit-image's photographs. Each network's rows are appended to OUT/matrix.csv
when it is done, and networks already in OUT are skipped; OUT/matrix.md is the table. It shows whether a network runs
and gives the right outputs, not how fast: latencies come from one short round, and parallel jobs, each with a separate
cache and GPU lock, disturb each other. With --one-cache they share both: files are made in parallel, and a GPU runs
one trial at a time. Several rounds are measured in turns, so that a disturbance hits every row, and show the fastest
trial. After --minutes the same command continues.
"""

from __future__ import annotations

import argparse
import csv
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dyno.formatting import format_number, markdown_table

ROOT = Path(__file__).resolve().parents[1]

# Convolutions, transformers and hybrids; then detectors and segmenters.
CLASSIFIERS = (
    "torchvision:alexnet vgg11_bn resnet18 resnet50 resnext50_32x4d wide_resnet50_2 densenet121 googlenet "
    "squeezenet1_1 shufflenet_v2_x1_0 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large mnasnet1_0 "
    "efficientnet_b0 efficientnet_v2_s regnet_y_400mf convnext_tiny swin_t vit_b_16 maxvit_t",
    "timm:vit_tiny_patch16_224 vit_small_patch16_224 deit_tiny_patch16_224 swin_tiny_patch4_window7_224 levit_128s "
    "mobilevit_s efficientformer_l1 fastvit_t8 convnextv2_atto ghostnet_100 repvgg_a0 mixer_s32_224 "
    "poolformer_s12 xcit_nano_12_p16_224 cait_xxs24_224 pit_ti_224 edgenext_x_small efficientvit_b0 "
    "mobilenetv4_conv_small hrnet_w18_small tf_efficientnet_lite0 eva02_tiny_patch14_224",
)
OTHERS = (
    "torchvision:fcn_resnet50 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large",
    "ultralytics:yolov8n.yaml yolov8n-seg.yaml yolov8n-pose.yaml yolov8n-cls.yaml yolo11n.yaml yolov5n.yaml",
)
KEPT = ("model", "backend", "options", "precision", "batch", "status", "outputs", "output_error", "answers_changed",
        "ran_as", "route", "latency_ms", "verdict", "reason")  # fmt: skip
FEW_CROPS = 32
MIN_LEFT_S = 30.0  # seconds that must be left to start a network, and for a study to end


def networks() -> list[str]:
    """Return every source in the lists above."""
    found = []
    for line in (*CLASSIFIERS, *OTHERS):
        library, _, names = line.partition(":")
        found += [f"{library}:{name}" for name in names.split()]
    return found


def measure(source: str, asked: argparse.Namespace, limit: float) -> list[dict[str, str]]:
    """Return the rows of one network, or a single row with the reason if the study gave no rows."""
    name = source.replace(":", "-")
    folder, cache = (
        asked.out.resolve() / "runs" / name,
        asked.out.resolve() / "caches" / ("" if asked.one_cache else name),
    )
    command = [sys.executable, "-m", "dyno", "run", source, "--backend", asked.backends, "--device", asked.device]
    command += ["--precision", asked.precision] if asked.precision else []  # else each backend names its own
    command += ["--batch", asked.batch, "--data", str(asked.out / "photos"), "--routes", "usual"]
    command += ["--rounds", str(asked.rounds), "--seconds", "0.2", "--warmup", "0.2", "--out", str(folder)]
    command += ["--until", "rounds", "--confirm", "0", "--sustained", "0"]
    command += [word for python in asked.python for word in ("--python", python)]
    command += ["--size", str(asked.size)] if asked.size else []
    threads = min(asked.threads, len(os.sched_getaffinity(0)))  # seconds of this job, not of the machine
    command += ["--threads", str(threads)] if threads else []
    environment = {
        **os.environ,
        "DYNO_CACHE": str(cache),
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    study = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        last = (study.communicate(timeout=limit)[1].strip().splitlines() or [f"exit code {study.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        study.send_signal(signal.SIGINT)  # the study ends its jobs and keeps their measurements
        try:
            study.communicate(timeout=MIN_LEFT_S)
        except subprocess.TimeoutExpired:  # a shell's background job ignores the signal
            study.kill()
            study.communicate()
        if limit < asked.limit:
            return []
        last = f"no end after {limit:.0f} s"
    if not any(folder.glob("trials/*/*/record.json")):  # no run, or ended before its first
        return [{"model": source.partition(":")[2], "status": "failed", "reason": last}]
    from dyno.report.tables import trial_table

    frame = trial_table.read_trials(folder).frame
    return [{name: str(row[name]) for name in KEPT} for _, row in frame.iterrows()]


def cell(row: dict[str, str]) -> str:
    """Format a trial for the table: its error and time, or its status."""
    if row["status"] != "ok":
        return row["status"]
    error = "" if row["output_error"] in ("", "nan") else f" ({float(row['output_error']):.0e})"
    wrong = "wrong " if row["outputs"] == "wrong outputs" else ""
    ran = "" if row["precision"] in row["ran_as"] or not row["ran_as"] else f" ran {row['ran_as'].split()[1]}"
    return f"{wrong}{format_number(float(row['latency_ms']))} ms{error}{ran}"


def way(row: dict[str, str], batches: int) -> str:
    """Return the column of a trial: backend with options, precision, and the batch if there are several."""
    options = f" ({row['options']})" if row["options"] not in ("", "nan") else ""
    return f"{row['backend']}{options} {row['precision']}" + (f" b{row['batch']}" if batches > 1 else "")


def table(rows: Iterable[dict[str, str]]) -> str:
    """Return a table with a line per network and a column per backend and precision, then the failures with reasons."""
    rows = list(rows)
    batches = len({r["batch"] for r in rows if r.get("backend")})
    ways = list(dict.fromkeys(way(r, batches) for r in rows if r.get("backend")))
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        own = lines.setdefault(row["model"], {})
        if row.get("backend"):
            own[way(row, batches)] = cell(row)
        else:
            own |= dict.fromkeys(ways, row["status"])
    body = [[name, *(own.get(each, "") for each in ways)] for name, own in lines.items()]
    bad = [r for r in rows if r["status"] not in ("ok", "skipped") or r.get("outputs") == "wrong outputs"]
    notes = [f"- {r['model']} {r.get('backend', '')} {r.get('precision', '')}: "
             f"{r['reason'] if r['status'] != 'ok' else r['verdict']}" for r in bad]  # fmt: skip
    return markdown_table(["network", *ways], body, [False] * (len(ways) + 1)) + "\n" + "\n".join(notes) + "\n"


def main() -> int:
    """Measure the networks that OUT lacks, one by one; return 0 when the table is complete."""
    asked = _arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    _photos(asked.out / "photos")
    path = (asked.rows or asked.out) / "matrix.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = threading.Lock()
    rows = list(csv.DictReader(path.open(encoding="utf-8"))) if path.exists() else []
    done = {row["network"] for row in rows}
    wanted = [name for name in asked.networks.split(",") if name] or networks()
    end = time.monotonic() + (asked.minutes * 60 or float("inf"))
    cores = sorted(os.sched_getaffinity(0))
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for job in range(asked.jobs):
        free.put(job)

    def run(source: str) -> None:
        began = time.monotonic()
        if (left := end - began) < MIN_LEFT_S:
            return
        job = free.get()
        # Workers take the first cores of their affinity: each job, a thread here, gets separate adjacent cores.
        share = len(cores) // asked.jobs
        os.sched_setaffinity(0, cores[job * share : (job + 1) * share] or cores)
        own = measure(source, asked, min(asked.limit, left))
        free.put(job)
        with writing:
            rows.extend({"network": source, **dict.fromkeys(KEPT, ""), **row} for row in own)
            _write(path.parent, rows)
        shown = ", ".join(f"{r['backend']} {r['precision']} {cell(r)}" if "backend" in r else r["reason"] for r in own)
        print(f"{source} in {time.monotonic() - began:.0f} s: {shown}", flush=True)

    with ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(run, [source for source in wanted if source not in done]))
    return 0 if {row["network"] for row in rows} >= set(wanted) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--backend", dest="backends", default="pytorch,onnxruntime,openvino")
    parser.add_argument("--precision", default="fp32,fp16,int8")
    parser.add_argument("--rows", type=Path, help="folder of matrix.csv and matrix.md (default: OUT)")
    parser.add_argument("--networks", default="", help="comma-separated sources instead of the whole list")
    parser.add_argument("--batch", default="2", help="one, or several with commas")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--size", default="", help="image size of all networks (default: each one's own)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--python", action="append", default=[], help="NAME=PATH, as dyno run has it")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one network")
    parser.add_argument("--jobs", type=int, default=1, help="networks side by side, each on separate cores")
    parser.add_argument("--one-cache", action="store_true", help="one cache and GPU queue for all networks")
    parser.add_argument("--minutes", type=float, default=0.0, help="end after so long; run again for the rest")
    return parser.parse_args()


def _photos(folder: Path) -> None:
    """Write some of the crops of studies/photos.py."""
    if folder.is_dir():
        return
    subprocess.run([sys.executable, ROOT / "studies" / "photos.py", folder], check=True)
    for index, photo in enumerate(sorted(folder.iterdir())):
        if index % (256 // FEW_CROPS):
            photo.unlink()


def _write(out: Path, rows: list[dict[str, str]]) -> None:
    with (out / "matrix.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["network", *KEPT])
        writer.writeheader()
        writer.writerows(rows)
    (out / "matrix.md").write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
