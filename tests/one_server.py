"""Run the groups of tests in parallel, then rerun the few failed tests alone.

`python tests/one_server.py COMMAND …` runs COMMAND, which starts the groups. Their tests fork all processes from one
server and share one torch.compile cache; see `preloaded.py`.

`python tests/one_server.py group NAME …` is one group: pytest with the remaining arguments. Three groups share two
processors, so a test may time out. Up to `FEW` failures of a group are therefore rerun when the groups have ended, and
the rerun decides. The first failure stays in the output; the last line names the tests.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import preloaded

FEW = 3
AGAIN = "DYNO_TESTS_AGAIN"  # folder for each group's list of failed tests
ROOT = Path(__file__).resolve().parents[1]


def run_groups(command: list[str]) -> int:
    """Run the groups, then rerun their failed tests; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="dyno-") as folder:
        cache = Path(folder, "inductor")
        os.environ |= {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache), AGAIN: folder}
        server = preloaded.Server(wait=False)  # tests without subprocesses run meanwhile
        try:
            os.environ[preloaded.RUNNING] = server.path
            code = subprocess.call(command)
            failed = [name for path in sorted(Path(folder).glob("*.json")) for name in json.loads(path.read_text())]
            if code or not failed:
                return code
            print(f"\nAgain, alone: {', '.join(failed)}", flush=True)
            code = subprocess.call([sys.executable, "-m", "pytest", *failed], cwd=ROOT)
            print(f"{'Failed again' if code else 'Passed alone'}: {', '.join(failed)}", flush=True)
            return code
        finally:
            server.stop()


def run_group(name: str, arguments: list[str]) -> int:
    """Run pytest; return 0 if `run_groups` is to rerun the few failures."""
    cache = ROOT / ".pytest_cache" / name
    code = subprocess.call([sys.executable, "-m", "pytest", "--cache-clear", "-o", f"cache_dir={cache}", *arguments])
    folder = os.environ.get(AGAIN)
    if code != 1 or not folder:
        return code
    failed = json.loads((cache / "v" / "cache" / "lastfailed").read_text())
    if not 0 < len(failed) <= FEW:
        return code
    Path(folder, f"{name}.json").write_text(json.dumps(list(failed)))
    return 0


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    sys.exit(run_group(rest[0], rest[1:]) if first == "group" else run_groups([first, *rest]))
