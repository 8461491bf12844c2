#!/usr/bin/env bash
# All GPU tests and the GPU study of ResNet-18, in one call on a machine that has torch with CUDA: bash benchmarks/gpu.sh OUT
# Nothing is installed: what the machine lacks is skipped with its reason. Records end up in OUT/runs.tar.gz.
set -u
out=${1:?usage: gpu.sh OUT}
mkdir -p "$out"
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH="$PWD/src" PYTHONUNBUFFERED=1
runs=$(mktemp -d)

python3 -m pytest -c /dev/null --rootdir . --import-mode=importlib -q -m gpu -p no:cacheprovider -W ignore tests 2>&1 |
  tee "$out/tests.log" | tail -n 15

python3 -m dyno.cli doctor | tee "$out/doctor.txt"
python3 -m dyno.cli run torchvision:resnet18 --device cuda:0 --rounds 2 --seconds 0.5 --batch 1,256 --out "$runs/resnet18" \
  --backends "pytorch@precision=fp32+tf32+fp16,compile@mode=reduce-overhead@precision=fp16@rounds=1" 2>&1 | tee "$out/run.log" | tail -n 60
python3 -m dyno.cli show "$runs/resnet18" --format markdown >"$out/resnet18.md"
python3 -m dyno.cli show "$runs/resnet18" --format csv >"$out/resnet18.csv"

tar -C "$runs" -czf "$out/runs.tar.gz" .
