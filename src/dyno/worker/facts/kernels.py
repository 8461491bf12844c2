"""Names of kernels, and of the ranges by which a profiler of kernels knows which call of a module launched them."""

from __future__ import annotations

LONGEST = 90  # characters of a kernel's name
WHOLE = "(model)"  # the module itself, which has no name
USELESS = ("void ", "at::native::", "(anonymous namespace)::", "<unnamed>::")


def short(name: str) -> str:
    """Return a kernel's name without its arguments and its uninformative parts."""
    for useless in USELESS:
        name = name.replace(useless, "")
    depth = 0
    for k, letter in enumerate(name):  # arguments begin with the first bracket outside the template's
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and not depth:
            name = name[:k].rstrip()
            break
    return name if len(name) <= LONGEST else f"{name[:LONGEST]}…"


def range_name(module: str, call: int) -> str:
    """Return the name of the NVTX range of a module's call, counted from 1: `conv1`, then `conv1#2`."""
    return (module or WHOLE) + (f"#{call}" if call > 1 else "")
