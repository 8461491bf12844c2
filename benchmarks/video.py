"""`dyno bench video` against a plain loop of the same steps, side by side: frames per second end to end.

    python benchmarks/video.py [--rounds 5] [--frames 600] [--size 128] [--model ultralytics:yolov8n.yaml]
    python benchmarks/video.py --predictions [--frames 600] [--model ultralytics:yolov8n.yaml]
    python benchmarks/video.py --device cuda:0 [--engines tensorrt@input=uint8] [--batch 32] [--python tensorrt=PATH]
        [--prepare host,device] [--decode host,device]

The loop follows tutorials: OpenCV reads and letterboxes a frame, ONNX Runtime infers with the same number of threads,
OpenCV runs NMS, draws the boxes and writes the frame, one step after the other. Both run the same ONNX file on the
same 960 x 540 video and write MPEG-4. The loop spends all threads on one frame, `dyno bench video` one thread on each
of that number of frames. In each round both run in fresh processes, in shuffled order. The time runs from the first
read to the closed file and excludes start-up. Memory is compared with its value half-way through the video, so give
more frames to see whether it is flat.

With `--predictions` there is no loop: ten configurations run (network sizes, with and without an output, batches in
flight, streams, engines), and the rate predicted from the stages alone is compared with the achieved rate. Two factors
make up an error: the processor time per frame relative to its estimate, and the pipeline's share of the processors'
time.

With `--device` there is no loop either: a GPU should never wait. Each engine first infers on frames decoded into
memory, and the end-to-end rate is compared with that of inference alone. Then it infers on the video without an
output, and the rate is compared with that of a loop that only decodes the file in the same way. The video is the same
one, repeated several times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

CONFIDENCE, IOU, GREY = 0.25, 0.7, 114
PRELOADED, FROM_MEMORY = 256, 40  # frames in memory, and repetitions of them
OVER = 10  # repetitions of a video for a GPU, so that filling and emptying the pipeline is negligible
# Network size, engine, streams of video, and the output's codec ("": no output).
CONFIGURATIONS = (
    (96, "onnxruntime@streams=2", 1, "mpeg4"),
    (128, "onnxruntime@streams=2", 1, "mpeg4"),
    (128, "onnxruntime", 1, "mpeg4"),
    (160, "openvino@streams=2", 1, "mpeg4"),
    (224, "onnxruntime@streams=2", 1, ""),
    (320, "onnxruntime@streams=2", 1, "mpeg4"),
    (320, "openvino", 1, ""),
    (96, "openvino@streams=2", 2, ""),
    (160, "onnxruntime@streams=2", 2, "mpeg4"),
    (128, "onnxruntime@streams=2", 4, ""),
)


def loop(video: str, model: str, output: str, *, threads: int) -> dict[str, float]:
    """Run the plain loop; return its frames and seconds."""
    import cv2
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    entry = session.get_inputs()[0]
    side = int(entry.shape[2])
    session.run(None, {entry.name: np.zeros((1, 3, side, side), np.float32)})
    count, began = 0, time.perf_counter()
    capture = cv2.VideoCapture(video)
    rate = capture.get(cv2.CAP_PROP_FPS)
    width, height = (int(capture.get(key)) for key in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
    writer = cv2.VideoWriter(output, cv2.VideoWriter.fourcc(*"mp4v"), rate, (width, height))
    while True:
        more, frame = capture.read()
        if not more:
            break
        scale = side / max(height, width)
        small = cv2.resize(frame, (round(width * scale), round(height * scale)))
        below, right = side - small.shape[0], side - small.shape[1]
        boxed = cv2.copyMakeBorder(small, 0, below, 0, right, cv2.BORDER_CONSTANT, value=(GREY, GREY, GREY))
        (rows,) = session.run(None, {entry.name: cv2.dnn.blobFromImage(boxed, 1 / 255, swapRB=True)})[:1]
        for left, top, wide, high, label, score in detections(rows[0], scale):
            corner = (int(left), int(top))
            cv2.rectangle(frame, corner, (int(left + wide), int(top + high)), (0, 255, 0), 2)
            cv2.putText(frame, f"{label} {score:.2f}", corner, cv2.FONT_HERSHEY_SIMPLEX, 0.5, (0, 255, 0), 1)
        writer.write(frame)
        count += 1
    capture.release()
    writer.release()
    return {"frames": count, "seconds": time.perf_counter() - began}


def detections(rows: np.ndarray, scale: float) -> list[tuple[float, float, float, float, int, float]]:
    """Return a frame's boxes: left, top, width, height, class and score."""
    import cv2

    scores = rows[4:].max(0)
    kept = scores > CONFIDENCE
    labels, scores = rows[4:, kept].argmax(0), scores[kept]
    boxes = rows[:4, kept].T / scale
    boxes[:, :2] -= boxes[:, 2:] / 2
    chosen = cv2.dnn.NMSBoxesBatched(boxes.tolist(), scores.tolist(), labels.tolist(), CONFIDENCE, IOU)
    return [(*boxes[k].tolist(), int(labels[k]), float(scores[k])) for k in np.asarray(chosen, int).reshape(-1)]


def pipeline(
    video: str, model: str, output: str, folder: str, *, threads: int, engine: str = "", streams: int = 1
) -> dict[str, float]:
    """Run `dyno bench video`; return frames, seconds, the share of its bound, memory growth, the prediction's error,
    and both factors of that error."""
    import dyno
    from dyno.video import figures
    from dyno.worker.video.options import VideoOptions

    options = VideoOptions(codec="mpeg4" if output else "", streams=streams)
    made = dyno.bench_video(video, output, model=model, out=folder, options=options, threads=threads,
                            backends=(engine or f"onnxruntime@streams={threads}",), task="detect")  # fmt: skip
    (row,) = made.table("video").rows
    seconds = row["frames"] * streams / row["fps"]
    (growth,) = [growing(path, seconds) for path in Path(folder).glob("trials/*/r0/telemetry.npz")]
    (error,) = [line["error"] for line in made.table("video-streams").rows if line["streams"] == streams]
    (filmed,) = figures.list_runs(made.data)
    found = filmed.typical
    return {"frames": row["frames"], "seconds": seconds, "reached": row["reached"], "growth": growth, "error": error,
            "cpu": found.facts.cpu_whole / found.cpu_under_load, "used": found.utilization}  # fmt: skip


def growing(path: Path, seconds: float) -> float:
    """Return the process tree's growth in MiB from half-way to the end of the video, which took `seconds`."""
    with np.load(path) as stored:
        at, held = stored["at"], stored["rss"]
    video = held[:-1][at[:-1] >= at[-1] - seconds]  # the last sample is taken as the process ends
    return float(video[-1] - video[len(video) // 2]) / 2**20 if len(video) > 3 else math.nan


def measured(kind: str, *words: str) -> dict[str, Any]:
    """Run one benchmark function in a separate process; return its result."""
    done = subprocess.run([sys.executable, __file__, "--only", kind, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Print both rates and their ratio by round, or the errors of predictions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=600)
    parser.add_argument("--size", default="128")
    parser.add_argument("--model", default="ultralytics:yolov8n.yaml")
    parser.add_argument("--threads", type=int, default=0, help="of inference, in both (default: one per core)")
    parser.add_argument("--device", default="", help="how well this device is fed, without a loop; such as cuda:0")
    parser.add_argument("--engines", default="pytorch", help="with --device: backends with options, with commas")
    parser.add_argument("--batch", type=int, default=32, help="with --device")
    parser.add_argument("--python", default="", help="with --device: another interpreter of a backend, BACKEND=PATH")
    parser.add_argument("--prepare", default="", help="with --device: host, device or both, with a comma")
    parser.add_argument("--decode", default="", help="with --device: the same")
    parser.add_argument("--predictions", action="store_true", help="predictions of ten configurations, without a loop")
    chosen = parser.parse_args()

    import moving_photos
    from dyno.worker import system

    threads = str(chosen.threads or system.physical_cores())
    with tempfile.TemporaryDirectory() as scratch:
        video = f"{scratch}/video.mp4"
        moving_photos.write(Path(video), moving_photos.pictures(chosen.frames, 540, 960))
        if chosen.device:
            on_a_device(chosen, scratch, video)
        else:
            (predictions if chosen.predictions else rounds)(chosen, scratch, video, threads)


def exported(model: str, size: str, scratch: str) -> str:
    """Return the network's ONNX file for images of that size; export it if it is missing."""
    path = f"{scratch}/network-{size}.onnx"
    if not Path(path).exists():
        export = [sys.executable, "-m", "dyno", "export", model, "-o", path, "--batch", "1", "--size", size]
        subprocess.run(export, check=True, capture_output=True, env=environment())
    return path


def on_a_device(chosen: argparse.Namespace, scratch: str, video: str) -> None:
    """Print how well a GPU is fed, from memory and from a file."""
    film = repeated(video, f"{scratch}/film.mp4")
    for decode in chosen.decode.split(","):
        decoder = "the GPU's decoder" if decode == "device" else "FFmpeg"
        decoding = measured("decoding", film, chosen.device if decode == "device" else "")["fps"]
        print(f"decoding alone, {decoder}: {decoding:,.0f} frames/s", flush=True)
        for engine, prepare in itertools.product(chosen.engines.split(","), chosen.prepare.split(",")):
            own = [chosen.model, chosen.size, engine, chosen.device, str(chosen.batch), chosen.python, prepare, decode]
            for preload in (min(chosen.frames, PRELOADED), 0):
                frames = preload * FROM_MEMORY or chosen.frames * OVER
                folder = f"{scratch}/run-{engine}-{preload}-{prepare}-{decode}"
                found = measured("device", film, folder, str(preload), str(frames), *own)
                best, what = (found["inference"], "inference alone") if preload else (decoding, "decoding alone")
                print(f"{chosen.model}, {engine}, batch {chosen.batch}, prepared by the {found['prepared']}, "
                      f"{'from memory' if preload else 'from the file'}: {found['fps']:,.0f} frames/s, "
                      f"{100 * found['fps'] / best:.1f} % of {what} ({best:,.0f}); inference alone "
                      f"{found['inference']:,.0f}; bound by {found['bound_by']}", flush=True)  # fmt: skip


def repeated(video: str, film: str) -> str:
    """Write the encoded video several times over; return the file."""
    import av

    with av.open(film, "w") as out:
        into, past = None, 0
        for _ in range(OVER):
            with av.open(video) as container:
                stream = container.streams.video[0]
                into = into or out.add_stream_from_template(stream)
                packets = [packet for packet in container.demux(stream) if packet.dts is not None]
                for packet in packets:
                    packet.pts, packet.dts, packet.stream = packet.pts + past, packet.dts + past, into
                ends = max(packet.pts + packet.duration for packet in packets)
                for packet in packets:
                    out.mux(packet)
                past = ends
    return film


def decoding(video: str, gpu: str) -> dict[str, float]:
    """Return the frames per second of a loop that only decodes the file, as `dyno bench video` does."""
    from dyno.worker.video.opening import open_source, prepare_libraries
    from dyno.worker.video.options import VideoOptions

    prepare_libraries()
    source = open_source(video, VideoOptions(), gpu)
    next(iter(source.read()))  # a GPU's decoder is slow to start
    began = time.perf_counter()
    count = sum(1 for _ in source.read())
    return {"fps": count / (time.perf_counter() - began)}


def device(video: str, folder: str, preload: str, frames: str, model: str, size: str, engine: str, gpu: str,
           batch: str, python: str, prepare: str, decode: str) -> dict[str, Any]:  # fmt: skip
    """Run `dyno bench video` without an output; return its rate and that of inference alone."""
    import dyno
    from dyno.video import figures
    from dyno.worker.video.options import VideoOptions

    options = VideoOptions(preload=int(preload), frames=int(frames), prepare=prepare, decode=decode)
    name, _, path = python.partition("=")
    made = dyno.bench_video(video, model=model, out=folder, options=options, backends=(engine,), task="detect",
                            device=gpu, sizes=(size,), batches=(int(batch),),
                            runtime={name: {"python": path}} if path else {})  # fmt: skip
    if not made.table("video").rows:
        raise SystemExit("; ".join(trial.reason for trial in made.records))
    (row,), (filmed,) = made.table("video").rows, figures.list_runs(made.data)
    return {"fps": row["fps"], "inference": row["inference_fps"], "bound_by": row["bound_by"],
            "prepared": filmed.typical.facts.prepared}  # fmt: skip


def rounds(chosen: argparse.Namespace, scratch: str, video: str, threads: str) -> None:
    """Run the loop and `dyno bench video` in each round, in shuffled order."""
    rates: dict[str, list[float]] = {"loop": [], "pipeline": []}
    shares, growths, errors = list[float](), list[float](), list[float]()
    model = exported(chosen.model, chosen.size, scratch)
    for number in range(chosen.rounds):
        for kind in random.Random(number).sample(sorted(rates), 2):
            own = [f"{scratch}/run{number}"] if kind == "pipeline" else []
            found = measured(kind, video, model, f"{scratch}/{kind}.mp4", *own, threads)
            assert found["frames"] == chosen.frames
            rates[kind].append(found["frames"] / found["seconds"])
            if kind == "pipeline":
                shares.append(found["reached"])
                growths.append(found["growth"])
                errors.append(abs(found["error"]))
                factors = shown_factors(found)
        ours, theirs = rates["pipeline"][-1], rates["loop"][-1]
        of_bound = f"{shares[-1]:.0f} % of its bound, prediction off by {errors[-1]:.0f} % ({factors})"
        both = f"loop {theirs:.1f} frames/s, dyno bench video {ours:.1f}, {ours / theirs:.2f}x"
        print(f"round {number + 1}: {both}, {of_bound}", flush=True)
    ratios = [a / b for a, b in zip(rates["pipeline"], rates["loop"], strict=True)]
    middle = [statistics.median(each) for each in (ratios, shares, errors, growths)]
    print(f"dyno bench video is {middle[0]:.2f}x as fast (median of {len(ratios)} rounds, from {min(ratios):.2f} to "
          f"{max(ratios):.2f}), at {middle[1]:.0f} % of its bound, its prediction off by {middle[2]:.0f} %; "
          f"memory grew by {middle[3]:.1f} MiB in the last half")  # fmt: skip


def predictions(chosen: argparse.Namespace, scratch: str, video: str, threads: str) -> None:
    """Print the error of each configuration's prediction."""
    errors = []
    for number, (size, engine, streams, codec) in enumerate(CONFIGURATIONS):
        model, output = exported(chosen.model, str(size), scratch), f"{scratch}/out.mp4" if codec else ""
        words = (video, model, output, f"{scratch}/run{number}", engine, str(streams), threads)
        found = measured("configuration", *words)
        errors.append(abs(found["error"]))
        print(f"size {size}, {engine}, streams of video {streams}, {codec or 'no output'}: "
              f"{found['frames'] * streams / found['seconds']:.1f} frames/s, {found['reached']:.0f} % of its bound, "
              f"predicted {found['error']:+.1f} % ({shown_factors(found)})", flush=True)  # fmt: skip
    print(f"predictions are off by {statistics.median(errors):.1f} % (median of {len(errors)} configurations), by "
          f"{max(errors):.1f} % at most")  # fmt: skip


def shown_factors(found: dict[str, float]) -> str:
    """Format both factors of an error."""
    return f"{found['cpu']:.2f}x the processor time, {100 * found['used']:.0f} % of the processors used"


def environment() -> dict[str, str]:
    """Return the environment of processes that use the checkout's own `dyno`."""
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--only"]:
        result: dict[str, Any]
        kind, film, *words = sys.argv[2:]
        net, target, *others, count = words if len(words) > 2 else ["", "", ""]
        if kind in ("decoding", "device"):
            result = decoding(film, *words) if kind == "decoding" else device(film, *words)
        elif kind == "loop":
            result = loop(film, net, target, threads=int(count))
        else:
            folder, engine, times = (*others, "", "1")[:3]
            result = pipeline(film, net, target, folder, threads=int(count), engine=engine, streams=int(times))
        print(json.dumps(result))
    else:
        main()
