#!/usr/bin/env bash
# All GPU tests, the GPU benchmarks and the study of one network, in one call on a machine with a GPU: bash benchmarks/gpu.sh OUT
# Nothing is installed: what the machine lacks is skipped with its reason. Every part writes into OUT as it goes, so that
# a call that is cut short loses nothing. PARTS names the parts to do (default: tests doctor study benchmarks matrix; beside
# them profile; video: how well the GPU is fed; ways: eight networks in every engine; verdicts; and cores: verdicts on the CPU,
# a copy on each two cores). The tests
# want a GPU for themselves: where the machine has two, tests and doctor have the first and everything else the second,
# side by side. All tests take more than 15 minutes: where a call may take ten, TESTS=1 does one half of them and TESTS=2
# the other, in whole files, as the tests of a file share what they build (TESTS=all, the default, does both).
# STUDY_BATCHES are those of the study (default 1,32,256: twelve engines, so a quarter of an hour; 32 takes four minutes).
# MATRIX_MINUTES ends the matrix of networks in time (default 9), MATRIX_JOBS says how many are built at once (default 3: with
# seven on one GPU, whose builders all time kernels on it, none was done in seven minutes), VERDICT_MINUTES ends each copy of
# the verdicts (default 9). Other interpreters are named by DYNO_TENSORRT_PYTHON, DYNO_ORTGPU_PYTHON and
# DYNO_TORCH_TENSORRT_PYTHON. Records end up in OUT/runs.tar.gz.
set -u
out=${1:?usage: gpu.sh OUT}
mkdir -p "$out"
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH="$PWD/src:$PWD/tools${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
runs=$(mktemp -d)
dyno() { python3 -m dyno "$@"; }
pythons=()
[ -n "${DYNO_TENSORRT_PYTHON:-}" ] && pythons+=(--python "tensorrt=$DYNO_TENSORRT_PYTHON")
[ -n "${DYNO_ORTGPU_PYTHON:-}" ] && pythons+=(--python "onnxruntime=$DYNO_ORTGPU_PYTHON")
trt=${DYNO_TENSORRT_PYTHON:-python3}

# A machine's minutes are few: what can't work is said before anything runs.
check() { [ -z "${1:-}" ] || "$1" -c "import $2" || { echo "gpu.sh: $1 can't import $2" >&2; exit 2; }; }
check "${DYNO_TENSORRT_PYTHON:-}" tensorrt
check "${DYNO_ORTGPU_PYTHON:-}" onnxruntime
check "${DYNO_TORCH_TENSORRT_PYTHON:-}" torch_tensorrt

PARTS=${PARTS:-tests doctor study benchmarks matrix}
case ${TESTS:-all} in 1 | 2 | all) ;; *) echo "gpu.sh: TESTS is $TESTS; give 1, 2 or all" >&2; exit 2 ;; esac
wanted() { [[ " $PARTS " == *" $1 "* ]]; }
wanted tests && check python3 "hypothesis, jsonschema, pytest"

# Two GPUs: the script once on each.
first=" tests doctor "
if [ -z "${CUDA_VISIBLE_DEVICES:-}" ] && [ "$(nvidia-smi -L 2>/dev/null | wc -l)" -gt 1 ] && wanted tests; then
  rest=$(for part in $PARTS; do [[ "$first" == *" $part "* ]] || echo -n "$part "; done)
  CUDA_VISIBLE_DEVICES=0 PARTS=$(for part in $PARTS; do [[ "$first" == *" $part "* ]] && echo -n "$part "; done) bash "$0" "$out" &
  CUDA_VISIBLE_DEVICES=1 PARTS=${rest:-none} bash "$0" "$out"
  wait
  exit
fi

if wanted tests; then
  # Other tests need what a machine with a GPU often lacks, and it is said of them when they are read.
  mapfile -t files < <(grep -rl "mark[.]gpu" tests | sort)
  pytest() { python3 -m pytest -c /dev/null --rootdir . --import-mode=importlib -q -m gpu -p no:cacheprovider -W ignore "$@"; }
  if [ "${TESTS:-all}" != all ]; then # the file with the most tests first, each into the half that has fewer so far
    mapfile -t files < <(pytest --collect-only "${files[@]}" 2>/dev/null | grep :: | cut -d: -f1 | sort | uniq -c | sort -k1,1rn -k2 |
      awk -v half="$TESTS" '{ k = tests[1] <= tests[2] ? 1 : 2; tests[k] += $1; if (k == half) print $2 }')
  fi
  pytest --durations=12 "${files[@]}" 2>&1 | tee "$out/tests${TESTS:+-$TESTS}.log" | tail -n 30
fi
if wanted doctor; then dyno doctor "${pythons[@]}" | tee "$out/doctor.txt"; fi

if wanted study; then
  python3 studies/photos.py "$runs/photos"
  dyno run studies/gpu-classifiers.toml --batch "${STUDY_BATCHES:-1,32,256}" --data "$runs/photos" "${pythons[@]}" --out "$runs/classifiers" 2>&1 |
    tee "$out/run.log" | tail -n 60
  dyno show "$runs/classifiers" --format markdown >"$out/classifiers.md"
  dyno show "$runs/classifiers" --format csv >"$out/classifiers.csv"
  tar -C "$runs" --exclude='*.engine' --exclude='*.onnx' --exclude=photos -czf "$out/runs.tar.gz" .
fi

if wanted benchmarks; then
  dyno export torchvision:resnet18 -o "$runs/r18.onnx"
  for batch in 1 256; do
    dyno export "$runs/r18.onnx" -o "$runs/r18-$batch.engine" --precision fp16 --batch "$batch" "${pythons[@]:0:2}"
  done
  {
    "$trt" benchmarks/gpu_loop.py "$runs"/r18-*.engine
    "$trt" benchmarks/gpu_pipeline.py "$runs/r18-256.engine"
    python3 benchmarks/timing_cache.py
  } 2>&1 | tee "$out/benchmarks.txt"
fi

if wanted matrix; then
  python3 benchmarks/matrix.py "$runs/matrix" --device cuda:0 --backend pytorch,tensorrt@optimization=1 --batch 8 --threads 1 \
    --jobs "${MATRIX_JOBS:-3}" --minutes "${MATRIX_MINUTES:-9}" --limit 300 "${pythons[@]:0:2}" --rows "$out" | cut -c1-200
fi

if wanted ways; then # files are made side by side, and one trial at a time is timed on the GPU; the same call goes on
  python3 benchmarks/matrix.py "${TMPDIR:-/tmp}/dyno-ways" --device cuda:0 --one-cache --precision fp16 --batch "${WAYS_BATCHES:-1,8,64}" \
    --backend 'pytorch,pytorch@graph=true,compile,aoti,onnxruntime,tensorrt,torchao@precision=int8' \
    --networks "torchvision:$(echo resnet18 resnet50 mobilenet_v3_large efficientnet_b0 convnext_tiny swin_t | sed 's/ /,torchvision:/g'),timm:vit_small_patch16_224,timm:regnety_004" \
    --threads 2 --jobs "${MATRIX_JOBS:-8}" --minutes "${MATRIX_MINUTES:-9}" --limit 560 "${pythons[@]}" --rows "$out/ways" | cut -c1-200
fi

if wanted profile; then
  profile() { dyno profile "$@" --device cuda:0 --top 12 "${pythons[@]:0:2}" 2>&1 | tee -a "$out/profile.txt"; }
  profile torchvision:resnet18 pytorch/fp16
  profile torchvision:resnet18 --batch 64
  if [ -n "${DYNO_TENSORRT_PYTHON:-}" ]; then
    profile torchvision:resnet18 tensorrt/fp16
    profile timm:vit_tiny_patch16_224 tensorrt/fp16 # one row for what TensorRT compiles as a whole
    python3 studies/photos.py "$runs/calibration" >/dev/null
    profile torchvision:resnet18 tensorrt/int8 --data "$runs/calibration"
  fi
fi

if wanted video; then
  for network in ultralytics:yolov8n.yaml ultralytics:yolov8m.yaml; do
    python3 benchmarks/video.py --device cuda:0 --model "$network" --size 640 --batch 16 --engines pytorch@precision=fp16
    [ -n "${DYNO_TENSORRT_PYTHON:-}" ] && python3 benchmarks/video.py --device cuda:0 --model "$network" --size 640 --batch 16 \
      --engines tensorrt@precision=fp16@optimization=1@input=uint8 --python "tensorrt=$DYNO_TENSORRT_PYTHON"
  done 2>&1 | tee "$out/video.txt"
fi

verdicts() { python3 benchmarks/verdicts.py --minutes "${VERDICT_MINUTES:-9}" "$@"; }
if wanted verdicts; then
  backends=pytorch
  [ -n "${DYNO_TENSORRT_PYTHON:-}" ] && backends=tensorrt,pytorch
  verdicts --until 3 --slowdown 0.01 --alone --device cuda:0 --backend "$backends" "${pythons[@]:0:2}" --store "$out/verdicts-gpu" 2>&1 |
    tee "$out/verdicts-gpu.txt" | tail -n 30
fi

if wanted cores; then
  for ((core = 0; core + 1 < $(nproc); core += 2)); do
    how=(--store "$out/verdicts")
    ((core % 4)) && how=(--until 5 --store "$out/until")
    taskset -c "$core,$((core + 1))" env DYNO_CACHE="$runs/cache-$core" \
      python3 benchmarks/verdicts.py --minutes "${VERDICT_MINUTES:-9}" "${how[@]}" >"$out/verdicts-$core.txt" 2>&1 &
  done
  wait
  verdicts --read "$out/verdicts"
  verdicts --read "$out/until" --until 5
fi
