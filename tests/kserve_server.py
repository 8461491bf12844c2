"""A small server of KServe's protocol v2 over HTTP: one model that sums each input of its batch.

It can misbehave: return any description of the model, and answer batches with errors or nonsense.
"""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

MODEL = "adder"
LENGTH = "Inference-Header-Content-Length"


class Handler(BaseHTTPRequestHandler):
    """Request handler; the class attributes set its misbehaviour. `binary`: tensors as raw bytes after the JSON."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits for the client's delayed acknowledgement
    binary = False
    shape = (-1, 3, 4)
    described: object = None  # replaces the model's description
    mute = ""  # path of requests that get no answer
    takes = 0.0  # seconds per batch
    most = 100  # concurrent batches; more are refused
    lacking = False  # no outputs in an answer
    beyond = 0  # values announced in an answer but missing
    factor = 1.0  # of the sums
    good = float("inf")  # number of batches before answers become infinite
    overflowing = 0  # size of batches with infinite answers
    alive = float("inf")  # number of batches before answers stop
    batches: list[int]
    places: threading.Semaphore

    def do_GET(self) -> None:
        if self.path == self.mute:
            self.rfile.read(1)  # until the client disconnects
            return
        described = [{"name": "x", "datatype": "FP32", "shape": self.shape}]
        answers: dict[str, Any] = {
            "/v2": {"name": "test", "version": "1", "extensions": ["binary_tensor_data"] if self.binary else []},
            f"/v2/models/{MODEL}": {
                "name": MODEL, "platform": "test", "inputs": described,
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1]}],
            },
        }  # fmt: skip
        if self.described is not None:
            answers[f"/v2/models/{MODEL}"] = self.described
        found = answers.get(self.path)
        self._send(200 if found else 404, found or {"error": f"unknown {self.path}"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        cut = int(self.headers.get(LENGTH, len(body)))
        (asked,) = json.loads(body[:cut])["inputs"]
        x = np.frombuffer(body[cut:], np.float32) if self.binary else np.asarray(asked["data"], np.float32)
        y = x.reshape(asked["shape"][0], -1).sum(1) * np.float32(self.factor)
        self.batches.append(len(y))
        if len(self.batches) > self.good or len(y) == self.overflowing:
            y += np.float32(np.inf)
        if len(self.batches) > self.alive:
            return self._send(500, {"error": "out of memory"})
        if not self.places.acquire(blocking=False):
            return self._send(503, {"error": "too many requests"})
        time.sleep(self.takes)
        self.places.release()
        output: dict[str, Any] = {"name": "y", "datatype": "FP32", "shape": [len(y) + self.beyond]}
        if self.binary:
            output["parameters"] = {"binary_data_size": y.nbytes}
        else:
            output["data"] = y.tolist()
        if self.lacking:
            return self._send(200, {"model_name": MODEL, "outputs": []})
        return self._send(200, {"model_name": MODEL, "outputs": [output]}, y.tobytes() if self.binary else b"")

    def _send(self, status: int, content: object, raw: bytes = b"") -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text) + len(raw)))
        if raw:
            self.send_header(LENGTH, str(len(text)))
        self.end_headers()
        self.wfile.write(text + raw)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def refusing() -> Iterator[str]:
    """Yield the URL of a port that is bound but not listening, so that no other server can take it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@contextmanager
def running(**settings: Any) -> Iterator[tuple[str, list[int]]]:
    """Run a server; yield its URL and the list of batches that it answered."""
    batches: list[int] = []
    own = {"batches": batches, "places": threading.Semaphore(settings.get("most", Handler.most)), **settings}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), own))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", batches
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
