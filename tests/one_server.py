"""`python tests/one_server.py COMMAND …`: all tests that the command starts fork their processes from one server, which
is started here, and compile into one cache of torch.compile; see `preloaded.py`."""

import os
import subprocess
import sys
import tempfile

import preloaded


def main(words: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="dyno-") as cache:
        os.environ |= {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        server = preloaded.Server(wait=False)  # tests that start nothing run meanwhile
        try:
            return subprocess.call(words, env={**os.environ, preloaded.RUNNING: server.path})
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
