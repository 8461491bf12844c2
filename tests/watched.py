"""Watched processes: host look-ups in Python and native code, and what they start, unpickle and run."""

import os
import shutil
import subprocess
from pathlib import Path

import dyno

# Replaces Python's host look-ups; imported by every process of a test, through PYTHONPATH.
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

# Records what a Python program starts, unpickles or runs. Code that libraries generate has no file.
STARTED = """
import os, sys

def _heard(event, args, heard={
    "os.system": str, "os.exec": str, "os.posix_spawn": str, "os.spawn": str, "subprocess.Popen": str,
    "pickle.find_class": lambda *names: ".".join(map(str, names)),
    "exec": lambda code: getattr(code, "co_filename", "?"),
}, busy=[]):
    tell = heard.get(event)
    if tell is None or busy or "STARTED" not in os.environ:
        return
    busy.append(1)
    try:
        said = tell(args[0]) if event != "pickle.find_class" else tell(*args)
        if event != "exec" or not said.startswith((sys.prefix, sys.base_prefix, os.environ["OWN_CODE"], "<")):
            with open(os.environ["STARTED"], "a") as f:
                f.write(event + " " + said.replace(chr(10), " ") + chr(10))
    finally:
        busy.pop()

sys.addaudithook(_heard)
"""

# The native counterpart: the C library's resolver, and connections to numeric addresses.
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


class Watch:
    """Environment with failing, recorded host look-ups; `started` also records started, unpickled and run code."""

    def __init__(self, folder: Path, *, started: bool = False) -> None:
        (folder / "python").mkdir()
        (folder / "python/sitecustomize.py").write_text(PYTHON + (STARTED if started else ""))
        self._notes = folder / "looked_up"
        (folder / "home").mkdir()
        self.env = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(folder / "python"), os.environ.get("PYTHONPATH")))),
            "LOOKED_UP": str(self._notes),
            "HOME": str(folder / "home"), "DYNO_CACHE": str(folder / "cache"),
        }  # fmt: skip
        if started:
            self.env |= {"STARTED": str(folder / "started"), "OWN_CODE": str(Path(dyno.__file__).parent)}
        self.native = self._build(folder)

    def _build(self, folder: Path) -> str:
        """Build and preload the native shim; return the reason why native code is not watched, or ""."""
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            return "no C compiler here, so look-ups in native code are not watched"
        (folder / "shim.c").write_text(NATIVE)
        built = [
            str(word) for word in [compiler, "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c", "-ldl"]
        ]
        done = subprocess.run(built, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            return f"the C compiler here can't build a shared library: {done.stderr.strip().splitlines()[-1]}"
        self.env["LD_PRELOAD"] = str(folder / "shim.so")
        return ""

    def hosts(self, kind: str) -> list[str]:
        path = self._notes.with_name(f"looked_up.{kind}")
        return path.read_text().splitlines() if path.exists() else []

    def notes(self) -> list[Path]:
        """Return the possible files of records, existing or not."""
        return [*(self._notes.with_name(f"looked_up.{kind}") for kind in ("python", "native")),
                self._notes.with_name("started")]  # fmt: skip
