"""A server of KServe's protocol v2 (Triton and others) in place of a local engine, for `dyno bench serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from dyno.worker.backend import Arrays, Backend, Session
from dyno.worker.extras import load_library
from dyno.worker.facts.engine import Probe
from dyno.worker.option_values import Check
from dyno.worker.spec import ENDPOINT_PREFIX as PREFIX
from dyno.worker.spec import Artifact, Dims, ModelSpec, Option, Tensor, Trial, Unanswered, UserError

URL_SCHEMES = ("http", "https", "grpc")
PROTOCOL = "KServe's protocol v2"
FIRST_ANSWER_TIMEOUT_S = 10  # limit for the server to describe itself; the client limits other requests
BINARY_EXTENSION = "binary_tensor_data"  # protocol extension for binary tensors


def address(url: Option) -> str:
    """Check for scheme, host and port, and no more; see `Check`."""
    expected = "http://HOST:PORT or grpc://HOST:PORT"
    parts = urlsplit(str(url))
    try:
        _ = parts.port
    except ValueError as e:
        return f"{expected} ({_first_line(e)})"
    is_complete = parts.scheme in URL_SCHEMES and parts.hostname and "@" not in parts.netloc
    return "" if is_complete else expected


class Endpoint(Backend):
    """A model on a server. Option: `url` (http://, https:// or grpc://, host and port).

    The trial's model is a name on the server, or a local model that the server has under its name. The server doesn't
    report its type and device of computing; it takes any batch that its model takes.
    """

    name = "endpoint"
    requires = ("tritonclient",)
    precisions = ("fp32", "fp16", "bf16", "int8", "fp8")
    options = ("url",)
    values: Mapping[str, Check] = {"url": address}
    offered = False

    def probe(self) -> Probe:
        """Return a probe without a version: there is nothing to run without a server."""
        load_library("tritonclient.http", "an endpoint")
        return Probe(version="", devices=("cpu",), detail="a server's")

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        """Return a session with its own connection; raise a `UserError` without the server or the model."""
        url = str(trial.options.get("url", ""))
        if expected := address(url):
            raise UserError(f"the endpoint is {url!r}; write {expected}")
        scheme, _, host = url.partition("://")
        is_grpc = scheme == "grpc"
        library = load_library(f"tritonclient.{'grpc' if is_grpc else 'http'}", "an endpoint")
        connect = partial(
            library.InferenceServerClient, host.rstrip("/"), **({"ssl": True} if scheme == "https" else {})
        )
        client = connect(
            **(
                {}
                if is_grpc
                else {"connection_timeout": FIRST_ANSWER_TIMEOUT_S, "network_timeout": FIRST_ANSWER_TIMEOUT_S}
            )
        )
        try:
            options = {"as_json": True, "client_timeout": FIRST_ANSWER_TIMEOUT_S} if is_grpc else {}
            server, metadata = _request_metadata(client, url, served_name(trial), options)
        finally:
            client.close()
        return ServerSession(library, connect(), trial, server, metadata)


ENDPOINT = Endpoint()


class ServerSession(Session):
    """One connection: `bind` writes a request's tensors, `run` sends it and receives the answer."""

    def __init__(self, library: Any, client: Any, trial: Trial, server: Any, metadata: Any) -> None:
        self._library, self._client = library, client
        self._model, self._url = served_name(trial), str(trial.options["url"])
        url = self._url
        try:
            # gRPC always sends raw bytes.
            self._written = (
                {} if url.startswith("grpc") else {"binary_data": BINARY_EXTENSION in server.get("extensions", ())}
            )
            self._kinds = {t["name"]: t["datatype"] for t in metadata["inputs"]}
            inputs = [self._parse_tensor(t, trial.dims) for t in metadata["inputs"]]
            self.outputs = tuple(self._parse_tensor(t, trial.dims) for t in metadata["outputs"])
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise UserError(f"{url} doesn't describe {self._model!r} as {PROTOCOL} says: {e!r}") from e
        self._names = self._match_inputs([tensor.name for tensor in inputs], trial.model)
        self.inputs = tuple(replace(tensor, name=self._names[tensor.name]) for tensor in inputs)

    def _match_inputs(self, names: list[str], model: ModelSpec) -> dict[str, str]:
        """Return the model's input name for each of the server's inputs: the same name, or else the same position.

        Raise a `UserError` for another number of inputs.
        """
        is_module = not (model.file or model.source.startswith(PREFIX))
        local_names = [spec.name for spec in model.inputs if spec.dtype] or (["input"] if is_module else names)
        if len(local_names) != len(names):
            a, b = ", ".join(names), ", ".join(local_names)
            raise UserError(f"{self._url}'s {self._model!r} takes {a}, and {model.name} here {b}: not the same model")
        return dict(zip(names, names if {*local_names} == {*names} else local_names, strict=True))

    def _parse_tensor(self, metadata: Mapping[str, Any], dims: Dims) -> Tensor:
        """Return an input or output from the server's description: -1 is a free axis; the first axis is the batch."""
        name, kind = metadata["name"], _import_dtype_converter()(metadata["datatype"])
        shape = [int(n) for n in metadata["shape"]]
        if shape and shape[0] < 0:
            shape[0] = dims.batch
        shape = list(dims.resolve(dims.shapes.get(name, shape)))
        if kind is None or kind is np.object_:
            raise UserError(f"{self._model}'s {name!r} is {metadata['datatype']}, which can't be made up here")
        return Tensor(name, np.dtype(kind).name, tuple(n if n >= 0 else f"axis{k}" for k, n in enumerate(shape)))

    def bind(self, feeds: Arrays, slot: int = 0) -> None:
        self._bound = []
        for name, local_name in self._names.items():
            array = np.ascontiguousarray(feeds[local_name])
            tensor = self._library.InferInput(name, list(array.shape), self._kinds[name])
            tensor.set_data_from_numpy(array, **self._written)
            self._bound.append(tensor)

    def run(self, slot: int = 0) -> None:
        try:
            self._answer = self._client.infer(self._model, self._bound)
        except Exception as e:  # errors of gevent, grpc, the system or JSON
            raise Unanswered(f"{self._url} did not answer: {_first_line(e)}") from e

    def fetch(self, slot: int = 0) -> dict[str, np.ndarray]:
        try:
            outputs = {tensor.name: self._answer.as_numpy(tensor.name) for tensor in self.outputs}
        except (KeyError, TypeError, ValueError) as e:
            raise Unanswered(f"{self._url} answered what isn't {PROTOCOL}: {_first_line(e)}") from e
        if missing_names := [name for name, array in outputs.items() if array is None]:
            raise Unanswered(f"{self._url} answered without {', '.join(missing_names)}")
        return outputs

    def close(self) -> None:
        self._client.close()


def served_name(trial: Trial) -> str:
    """Return the server's name for the trial's model."""
    source = trial.model.source
    return source[len(PREFIX) :] if source.startswith(PREFIX) else trial.model.name


def _request_metadata(client: Any, url: str, model: str, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the server's descriptions of itself and of the model.

    Raise a `UserError` without an answer within `FIRST_ANSWER_TIMEOUT_S` seconds.
    """
    try:
        server = client.get_server_metadata(**options)
    except Exception as e:  # errors of gevent, grpc or the system
        reason = f"nothing came within {FIRST_ANSWER_TIMEOUT_S} s" if _is_timeout(e) else _first_line(e)
        raise UserError(f"no server of {PROTOCOL} answers at {url}: {reason}; check that it runs") from e
    try:
        return server, client.get_model_metadata(model, **options)
    except Exception as e:
        if _is_timeout(e):
            raise UserError(
                f"{url} did not answer about {model!r} within {FIRST_ANSWER_TIMEOUT_S} s; check that it is loaded"
            ) from e
        raise UserError(f"{url} has no model {model!r}: {_first_line(e)}") from e


def _is_timeout(e: Exception) -> bool:
    return isinstance(e, TimeoutError) or "DEADLINE_EXCEEDED" in str(e)


def _import_dtype_converter() -> Any:
    from tritonclient.utils import triton_to_np_dtype

    return triton_to_np_dtype


def _first_line(e: Exception) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0]
