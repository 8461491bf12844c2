"""Nothing phones home: a study over every backend found here looks up no host, in Python or in native code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dyno.planning.interpreters import installed

Command = Callable[..., "subprocess.CompletedProcess[str]"]

# Replaces what Python programs look hosts up with; every process of a test imports it, because it is on PYTHONPATH.
PYTHON = """
import os, socket

def refuse(name):
    def refused(host=None, *_, **__):
        with open(os.environ["LOOKED_UP"] + ".python", "a") as f:
            f.write(f"{name} {host}\\n")
        raise socket.gaierror(socket.EAI_NONAME, "name resolution is off in this test")
    return refused

for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "create_connection"):
    setattr(socket, name, refuse(name))
"""

# The same below Python: the C library's resolver, and connections to an address that needed none.
NATIVE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

static void note(const char *name, const char *host) {
    char path[4096];
    const char *base = getenv("LOOKED_UP");
    if (!base) return;
    snprintf(path, sizeof path, "%s.native", base);
    FILE *f = fopen(path, "a");
    if (f) { fprintf(f, "%s %s\\n", name, host ? host : "(none)"); fclose(f); }
}

int getaddrinfo(const char *host, const char *port, const struct addrinfo *hints, struct addrinfo **found) {
    note("getaddrinfo", host);
    return EAI_NONAME;
}

struct hostent *gethostbyname(const char *host) { note("gethostbyname", host); h_errno = HOST_NOT_FOUND; return NULL; }

struct hostent *gethostbyname2(const char *host, int family) { return gethostbyname(host); }

int gethostbyname_r(const char *host, struct hostent *ret, char *buf, size_t len, struct hostent **found, int *code) {
    note("gethostbyname_r", host);
    *found = NULL;
    *code = HOST_NOT_FOUND;
    return 0;
}

int connect(int fd, const struct sockaddr *to, socklen_t length) {
    if (to->sa_family == AF_INET || to->sa_family == AF_INET6) {
        note("connect", "an address");
        errno = ENETUNREACH;
        return -1;
    }
    int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
    return real(fd, to, length);
}
"""

NET = """
from torch import nn

def net(num_classes=10):
    stem = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*stem, nn.Linear(16, num_classes))
"""


class Watch:
    """An environment in which every look-up fails and is noted."""

    def __init__(self, folder: Path) -> None:
        (folder / "python").mkdir()
        (folder / "python/sitecustomize.py").write_text(PYTHON)
        self._notes = folder / "looked_up"
        (folder / "home").mkdir()
        self.env = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(folder / "python"), os.environ.get("PYTHONPATH")))),
            "LOOKED_UP": str(self._notes),
            "HOME": str(folder / "home"), "DYNO_CACHE": str(folder / "cache"),
        }  # fmt: skip
        self.native = self._build(folder)

    def _build(self, folder: Path) -> str:
        """The reason why native code is not watched, or ""."""
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            return "no C compiler here, so look-ups in native code are not watched"
        (folder / "shim.c").write_text(NATIVE)
        built = [compiler, "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c", "-ldl"]
        done = subprocess.run(built, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            return f"the C compiler here can't build a shared library: {done.stderr.strip().splitlines()[-1]}"
        self.env["LD_PRELOAD"] = str(folder / "shim.so")
        return ""

    def hosts(self, kind: str) -> list[str]:
        path = self._notes.with_name(f"looked_up.{kind}")
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path)


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.getaddrinfo('somewhere.invalid', 443)",
        "import urllib.request as r; r.urlopen('http://somewhere.invalid/')",
    ],
)
def test_a_look_up_in_python_is_seen(watch: Watch, code: str) -> None:
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **watch.env}, capture_output=True, timeout=1200)
    assert watch.hosts("python")
    assert "somewhere.invalid" in watch.hosts("python")[0]


def test_a_look_up_in_native_code_is_seen(watch: Watch) -> None:
    if watch.native:
        pytest.skip(watch.native)
    code = "import ctypes; ctypes.CDLL(None).getaddrinfo(b'somewhere.invalid', None, None, None)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **watch.env}, timeout=1200, check=True)
    assert watch.hosts("native") == ["getaddrinfo somewhere.invalid"]
    code = "import socket; s = socket.socket(); s.connect_ex(('192.0.2.1', 443))"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **watch.env}, timeout=1200, check=True)
    assert watch.hosts("native")[-1] == "connect an address"


@pytest.mark.slow
def test_a_yolo_network_looks_nothing_up_and_leaves_the_home_alone(watch: Watch, dyno: Command, tmp_path: Path) -> None:
    for library in ("ultralytics", "onnxruntime"):
        pytest.importorskip(library)
    short = ("--size", 32, "--seconds", 0.1, "--warmup", 0.05, "--rounds", 1)
    ways = ("--backends", "onnxruntime@exporter=torchscript")  # the one that takes less time
    done = dyno(
        "run", "ultralytics:yolov8n-cls.yaml", *short, *ways, "--out", tmp_path / "run", env=watch.env, timeout=1200
    )
    assert done.returncode == 0, done.stderr + done.stdout
    logs = "".join(log.read_text() for log in (tmp_path / "run").rglob("std*.log"))
    assert "ltralytics" not in logs
    assert not list((tmp_path / "home").rglob("*ltralytics*"))
    assert watch.hosts("python") == []
    if watch.native:
        pytest.skip(watch.native)
    assert watch.hosts("native") == []


@pytest.mark.slow
def test_a_study_over_every_backend_looks_nothing_up(watch: Watch, dyno: Command, tmp_path: Path) -> None:
    for library in ("torch", "onnx", "sklearn"):
        pytest.importorskip(library)
    (tmp_path / "small.py").write_text(NET)
    model = (f"{tmp_path / 'small.py'}:net", "--channels", 1, "--size", 16)
    short = ("--rounds", 1, "--seconds", 0.1, "--warmup", 0.05)
    every = installed("cpu")
    ways = [f"{name}@precision=int8" if name == "onnxruntime" else name for name in every]  # it calibrates too
    words = ("run", *model, "--data", "digits", "--backends", ",".join(ways), *short, "--out", tmp_path / "run")
    for command in (words, ("doctor",), ("show", tmp_path / "run")):
        done = dyno(*command, env=watch.env, timeout=1200)
        assert done.returncode == 0, done.stderr + done.stdout
    rows = [line.split(",") for line in (tmp_path / "run/results.csv").read_text().splitlines()[1:]]
    assert {row[1].partition("@")[0] for row in rows} == set(every)
    assert watch.hosts("python") == []
    if watch.native:
        pytest.skip(watch.native)
    assert watch.hosts("native") == []
