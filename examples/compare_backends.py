"""Compare two engines from Python: a narrow ResNet-18 at 64 x 64, random weights, PyTorch against ONNX Runtime.

python examples/compare_backends.py [FOLDER]
"""

from __future__ import annotations

import sys

import dyno


def compare(folder: str = "runs/example") -> dyno.Result:
    """Measure what the folder doesn't hold yet, print it, and return the result."""
    study = dyno.Study(
        models=("dyno.worker.nets.digits:resnet18",),
        backends=("pytorch", "onnxruntime"),
        batches=(8,),
        sizes=("64",),
        channels=1,
        rounds=2,
        seconds=0.3,
        warmup=0.3,
    )
    result = study.run(folder, quiet=True)

    table = result.to_pandas()
    shown = ["backend", "batch", "latency_model_ms_median", "throughput_ips", "speedup_low", "speedup", "verdict"]
    print(table[shown].round(3).to_string(index=False))

    # Raw samples are stored: any other statistic is a function over them.
    for trial in result.records:
        samples = trial.samples("latency", "model")  # seconds, all good rounds together
        print(f"{trial.label}: {len(samples)} samples, fastest {samples.min() * 1e3:.3f} ms")
    return result


def main() -> None:
    """Run the study, write its report, and read the folder again as a later session would."""
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/example"
    print(compare(folder).report())

    again = dyno.load(folder).to_pandas()
    assert set(again["status"]) == {"ok"}, again[["backend", "status", "reason"]]


if __name__ == "__main__":
    try:
        main()
    except dyno.UserError as e:
        sys.exit(str(e))
