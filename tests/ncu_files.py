"""Real output of ncu 2025.3.1, from an H200 on 2026-11-23, and a fake ncu.

`ncu_output` has the kernels 0 to 35 and 155 to 163 of ResNet-18 in PyTorch (FP16, batch 32; a range around each
module's call) and 24 kernels of its TensorRT 8.6 engine (FP32), as ncu printed them, without unused columns. The fake
runs the given program, as ncu does, and then writes one of these files; the environment variable PRETEND sets any
misbehaviour.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "ncu_output"
PYTORCH, TENSORRT = FOLDER / "resnet18-pytorch-fp16.csv", FOLDER / "resnet18-tensorrt-fp32.csv"
PRETEND = "TEST_NCU"
STAND_IN = """#!{python}
import os, pathlib, signal, subprocess, sys
words, valued = sys.argv[1:], {{}}
while words[0].startswith("--"):
    name = words.pop(0)
    valued[name] = words.pop(0) if name not in ("--nvtx", "--csv") else ""
log, how = pathlib.Path(valued["--log-file"]), os.environ.get("{pretend}", "")
print(sorted(valued), flush=True)
lines = open("{output}").readlines()  # TensorRT writes other separators of lines too
begin = next(k for k, line in enumerate(lines) if line.startswith('"ID"'))
connected, header = lines[:begin], lines[begin:]
if how == "busy":
    log.write_text("==ERROR== An error was reported by the driver:\\n==ERROR== Profiling failed because a driver "
                   "resource was unavailable. Ensure that no other tool (like DCGM) is concurrently collecting\\n"
                   '==ERROR== Failed to profile "k" in process 7\\n')
    sys.exit(9)
def ended(*_):
    log.write_text("".join([*connected, "==PROF== Received signal\\n", *header[:12]]))
    os._exit(1)
signal.signal(signal.SIGINT, ended)
code = subprocess.run(words).returncode
if how == "denied":
    log.write_text("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance "
                   "Counters on the target device 0.\\n==WARNING== No kernels were profiled.\\n")
elif how == "none":
    log.write_text("==WARNING== No kernels were profiled.\\n")
elif how == "part":
    log.write_text("".join([*connected, '==ERROR== UnknownError\\n==ERROR== Failed to profile "k" in process 7\\n',
                            *header[:22]]))
else:
    log.write_text("".join([*connected, *header]))
sys.exit(code)
"""


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def stand_in(folder: Path, output: Path = TENSORRT) -> Path:
    """Write an executable `ncu` into the folder; it prints this output."""
    path = folder / "ncu"
    path.write_text(STAND_IN.format(python=sys.executable, output=output, pretend=PRETEND), encoding="utf-8")
    path.chmod(0o755)
    return path
