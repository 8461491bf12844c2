"""Chrome's trace event format, which Perfetto opens.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Event = dict[str, Any]


def document(events: Iterable[Event], exporter: str, note: str) -> dict[str, Any]:
    """Return the whole file; the note explains how the times were measured."""
    return {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": {"exporter": exporter, "note": note}}


def process(pid: int, name: str) -> Iterator[Event]:
    """Yield a process's name, and its place among the others."""
    thread = {"pid": pid, "tid": 1}
    yield {"ph": "M", "name": "process_name", **thread, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", **thread, "args": {"sort_index": pid}}


def track(pid: int, tid: int, name: str) -> Event:
    """Return the event that names a track within its process."""
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
