#!/usr/bin/env bash
# All GPU tests, the GPU benchmarks and the study of one network, in one call on a machine with a GPU: bash benchmarks/gpu.sh OUT
# Nothing is installed: what the machine lacks is skipped with its reason. Other interpreters are named by
# DYNO_TENSORRT_PYTHON, DYNO_ORTGPU_PYTHON and DYNO_TORCH_TENSORRT_PYTHON. Records end up in OUT/runs.tar.gz.
set -u
out=${1:?usage: gpu.sh OUT}
mkdir -p "$out"
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
runs=$(mktemp -d)
dyno() { python3 -m dyno "$@"; }
pythons=()
[ -n "${DYNO_TENSORRT_PYTHON:-}" ] && pythons+=(--python "tensorrt=$DYNO_TENSORRT_PYTHON")
[ -n "${DYNO_ORTGPU_PYTHON:-}" ] && pythons+=(--python "onnxruntime=$DYNO_ORTGPU_PYTHON")
trt=${DYNO_TENSORRT_PYTHON:-python3}

python3 -m pytest -c /dev/null --rootdir . --import-mode=importlib -q -m gpu -p no:cacheprovider -W ignore tests 2>&1 |
  tee "$out/tests.log" | tail -n 15
dyno doctor "${pythons[@]}" | tee "$out/doctor.txt"

python3 studies/photos.py "$runs/photos"
dyno run studies/gpu-classifiers.toml --data "$runs/photos" "${pythons[@]}" --out "$runs/classifiers" 2>&1 | tee "$out/run.log" | tail -n 60
dyno show "$runs/classifiers" --format markdown >"$out/classifiers.md"
dyno show "$runs/classifiers" --format csv >"$out/classifiers.csv"

dyno export torchvision:resnet18 -o "$runs/r18.onnx"
for batch in 1 256; do
  dyno build "$runs/r18.onnx" -o "$runs/r18-$batch.engine" --precision fp16 --batch "$batch" "${pythons[@]:0:2}"
done
{
  "$trt" benchmarks/gpu_loop.py "$runs"/r18-*.engine
  "$trt" benchmarks/gpu_pipeline.py "$runs/r18-256.engine"
  python3 benchmarks/timing_cache.py
} 2>&1 | tee "$out/benchmarks.txt"

tar -C "$runs" --exclude='*.engine' --exclude='*.onnx' --exclude=photos -czf "$out/runs.tar.gz" .
