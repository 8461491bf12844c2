"""An application's requests: its network's recorded inputs, and the seconds of each stage with an engine."""

from __future__ import annotations

import copy
import gc
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker import system
from dyno.worker.backend import Session
from dyno.worker.facts.engine import ORIGIN_FIELDS
from dyno.worker.facts.job import APPLICATION_STAGES as STAGES
from dyno.worker.facts.job import ApplicationFacts
from dyno.worker.inputs import input_data
from dyno.worker.inputs.modules import signature_of
from dyno.worker.jobs.run_trial import answer_all, make_failure
from dyno.worker.journal import Journal
from dyno.worker.nets import models
from dyno.worker.nets.models import Application
from dyno.worker.record import save_arrays
from dyno.worker.registry import find
from dyno.worker.sessions.torch_support import first_line, import_torch, is_memory_error, named_outputs
from dyno.worker.spec import Job, Unavailable, UserError, add_noun, shorten

ARRAYS_FILE = "application.npz"  # seconds by stage, float64 [requests, passes]
INPUTS_FILE = "inputs.npz"
PREPROCESS, _, POSTPROCESS, _ = STAGES
MAX_REQUESTS, MAX_BYTES, MAX_PASS_S = 32, 1 << 28, 5.0  # limits of the recording
LIBRARY_FOLDERS = {"site-packages", "dist-packages"}

Arrays = dict[str, np.ndarray]
now = time.perf_counter_ns


def run_application(job: Job, journal: Journal) -> None:
    """Store the network's inputs of each request, or time the requests with the trial's engine as the network.

    Options of the job: `requests` (paths; empty: NAME_requests() returns them) and, to time, `count` (number of
    requests).
    """
    assert job.trial is not None
    trial = job.trial
    torch = import_torch()
    torch.set_num_threads(trial.runtime.threads)
    journal.stage("load the application")
    requests = _InstrumentedApplication(models.load_application(trial.model), job.options["requests"])
    if "count" not in job.options:
        _store_inputs(requests, journal)
        return
    backend = find(trial.backend)
    journal.record = replace(journal.record, system=system.describe(("numpy", *backend.requires)))
    session: Session = journal.time_stage("load", "load", lambda: backend.load(trial, job.artifact))
    torch.set_num_threads(trial.runtime.threads)  # an engine's library may have set it
    has_finite = job.round > 0 or _answer_known(job, session, journal)
    requests.use(session)
    journal.stage("warm up")
    count, plan = int(job.options["count"]), trial.plan
    _answer_requests(requests, count, plan.warmup_s, whole_passes=False)
    journal.stage("time requests")
    gc.collect()
    gc.freeze()  # existing objects aren't collected during requests
    contention = system.CpuContention()
    seconds = _answer_requests(requests, count, plan.seconds, whole_passes=True)
    journal.record_contention("requests", contention.count_busy(), trial.runtime.device, contention.count_withheld())
    save_arrays(journal.folder / ARRAYS_FILE, dict(zip(STAGES, seconds.reshape(-1, count, len(STAGES)).T, strict=True)))
    journal.facts(application=ApplicationFacts(count, requests.calls))
    journal.stage("inspect")
    journal.record = replace(journal.record, facts=journal.record.facts.merge(session.facts()))
    journal.stage("close")
    session.close()
    if not has_finite:
        raise make_failure()


def _answer_known(job: Job, session: Session, journal: Journal) -> bool:
    """Store the engine's outputs for the network's inputs of all requests; return whether any value is finite."""
    assert job.trial is not None
    trial, model = job.trial, job.trial.model
    feeds = [*input_data.read_trial_batches(trial, session.inputs)]
    inherited = job.artifact.made_by.set_fields(ORIGIN_FIELDS) if job.artifact else {}
    journal.facts(inputs_sha256=input_data.hash_feeds(feeds, model.preprocess), **inherited)
    journal.stage("evaluate")
    return answer_all(session, trial, journal, should_time=False)


def _answer_requests(requests: _InstrumentedApplication, count: int, seconds: float, whole_passes: bool) -> np.ndarray:
    """Answer requests in turn for `seconds`, at wish in whole passes; return seconds [requests, stages]."""
    times: list[tuple[int, ...]] = []
    deadline = now() + int(seconds * 1e9)
    while not times or now() < deadline or (whole_passes and len(times) % count):
        times.append(requests.answer(len(times) % count))
    return np.asarray(times, np.float64) / 1e9


class _InstrumentedApplication:
    """The requests of an application, with the network's calls recorded or passed to an engine."""

    def __init__(self, application: Application, paths: Sequence[str]) -> None:
        self._application, self._network = application, application.network
        self._parameters = [*signature_of(self._network).required]
        self.requests = [Path(path) for path in paths] or self._make_requests()
        predict = getattr(application.value, "predict", None)
        self._predict = predict if callable(predict) and predict is not self._network else self._call_network
        self.recorded: list[tuple[Arrays, Any]] = []  # inputs and result of each call of the network
        self.calls = self._nanoseconds = 0  # totals of the latest request
        self._synchronize = _find_synchronize()
        try:
            self._forward, self._network.forward = self._network.forward, self._record
        except Exception as e:  # TorchScript's modules refuse it
            raise UserError(
                f"{application.name} has a {type(self._network).__name__} as its model, which no engine can stand in "
                f"for ({first_line(e)}); give the module that it was made from"
            ) from e

    def _make_requests(self) -> list[Any]:
        function = f"{self._application.name.partition('(')[0].rpartition(':')[2]}_requests"
        if self._application.requests is None:
            raise UserError(
                f"there are no requests; give photos with --data, or write {function}(), which returns a list"
            )
        with self._explain_error(function):
            requests = self._application.requests()
        if not isinstance(requests, (list, tuple)) or not len(requests):
            raise UserError(f"{function}() returned {_describe(requests)}; it must return a list of requests")
        return [*requests]

    def use(self, session: Session) -> None:
        """Answer one request by the network itself, to learn its result's structure; then use the engine instead."""
        self.answer(0)
        examples, names = self.recorded, [tensor.name for tensor in session.inputs]
        torch = import_torch()

        def answer_by_engine(*args: Any, **keywords: Any) -> Any:
            feeds = self._read_inputs(args, keywords)
            start = now()
            session.bind({name: feeds[name] for name in names if name in feeds})
            session.run()
            session.wait()
            outputs = session.fetch()
            self._nanoseconds += now() - start
            example = examples[self.calls % len(examples)][1]
            self.calls += 1
            return _fill_in(torch, example, iter([outputs[name] for name in named_outputs(example)]))

        self._network.forward = answer_by_engine

    def answer(self, index: int) -> tuple[int, int, int, int]:
        """Answer one request and return the nanoseconds of STAGES; raise a `UserError` if a stage fails."""
        value, request = self._application.value, self.requests[index]
        with suppress(Exception):  # an uncopyable request is reused as the last answer left it
            request = copy.deepcopy(request)
        self.calls = self._nanoseconds = 0
        start_ns = now()
        with self._explain_error(PREPROCESS, index):
            inputs = value.preprocess(request)
            self._synchronize()
        prepared_ns = now()
        with self._explain_error("model" if self._predict == self._call_network else "predict", index, inputs):
            outputs = self._predict(inputs)
            self._synchronize()
        predicted_ns = now()
        with self._explain_error(POSTPROCESS, index, outputs):
            answer = value.postprocess(outputs)
            if hasattr(answer, "__next__"):  # run the generator
                deque(answer, maxlen=0)
            self._synchronize()
        end_ns = now()
        if not self.calls:
            raise UserError(f"predict of {self._application.name} doesn't call its model, so no engine can replace it")
        return prepared_ns - start_ns, self._nanoseconds, end_ns - predicted_ns, end_ns - start_ns

    def _call_network(self, inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            return self._network(**inputs)
        return self._network(*inputs) if isinstance(inputs, (list, tuple)) else self._network(inputs)

    def _record(self, *args: Any, **keywords: Any) -> Any:
        torch = import_torch()
        # Copied, as an application may fill one buffer for every request, and a network may change its inputs.
        feeds = {name: array.copy() for name, array in self._read_inputs(args, keywords).items()}
        start = now()
        tensors = {name: torch.from_numpy(value) for name, value in keywords.items() if isinstance(value, np.ndarray)}
        with torch.no_grad():
            result = self._forward(
                *(torch.from_numpy(value) if isinstance(value, np.ndarray) else value for value in args),
                **{**keywords, **tensors},
            )
        self._nanoseconds += now() - start
        self.calls += 1
        self.recorded.append((feeds, result))
        return result

    def _read_inputs(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Arrays:
        """Return the network's arguments by name, as arrays in host memory."""
        names = [*self._parameters, *(f"input_{k}" if k else "input" for k in range(len(self._parameters), len(args)))]
        inputs = {**dict(zip(names, args, strict=False)), **keywords}
        return {name: _to_array(name, value) for name, value in inputs.items() if value is not None}

    def _explain_error(self, stage: str, index: int = -1, value: Any = None) -> _ExplainedErrors:
        return _ExplainedErrors(self._application, stage, index, value)


class _ExplainedErrors:
    """A context that turns errors of the user's code into one line with the place; no generator: requests are timed."""

    def __init__(self, application: Application, stage: str, index: int, value: Any) -> None:
        self._application, self._stage, self._request_index, self._argument = application, stage, index, value

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, frames: Any) -> None:
        if error is None or isinstance(error, (UserError, Unavailable, MemoryError, KeyboardInterrupt)):
            return
        if is_memory_error(error):
            raise MemoryError(first_line(error)) from error
        failure = f"{self._stage} of {self._application.name} failed{_find_place(frames)}"
        message = first_line(error)
        message = type(error).__name__ + (f": {message}" if message != type(error).__name__ else "")
        request = f", request {self._request_index + 1}" if self._request_index >= 0 else ""
        value_text = f" on {_describe(self._argument)}" if self._argument is not None else ""
        raise UserError(f"{failure}{value_text}{request}: {shorten(message)}") from error


def _find_place(frames: Any) -> str:
    """Return the innermost file and line of the user's own code; "" outside it."""
    skipped_dirs = (Path(traceback.__file__).parent, Path(__file__).parents[2])  # Python's library, and Dyno
    locations = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(frames)]
    matches = [
        f" at {path.name}:{line}"
        for path, line in locations
        if path.is_file() and not any(map(path.is_relative_to, skipped_dirs)) and not LIBRARY_FOLDERS & set(path.parts)
    ]
    return matches[-1] if matches else ""


def _describe(value: Any) -> str:
    """Return a short description of a value: its shape and type, or its parts' shapes and types."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{'x'.join(map(str, value.shape)) or 'a scalar'} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return shorten(", ".join(f"{name} {_describe(each)}" for name, each in value.items()) or "an empty dict")
    if isinstance(value, (list, tuple)):
        return shorten(", ".join(map(_describe, value)) or "nothing")
    return f"a {type(value).__name__}"


def _to_array(name: str, value: Any) -> np.ndarray:
    torch = import_torch()
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return np.asarray((value.float() if value.dtype == torch.bfloat16 else value).numpy())
    if isinstance(value, np.ndarray):
        return value
    raise UserError(f"the network's input {name!r} is {_describe(value)}; an engine takes tensors and arrays alone")


def _fill_in(torch: Any, example: Any, arrays: Iterator[np.ndarray]) -> Any:
    """Return a copy of the network's result with these arrays in place of its tensors, cast to their types."""
    if isinstance(example, torch.Tensor):
        tensor = torch.from_numpy(np.array(next(arrays)))
        return torch.view_as_complex(tensor) if example.is_complex() else tensor.to(example.dtype)
    if isinstance(example, Mapping):
        mapping_type: Callable[[Any], Any] = type(example)
        return mapping_type({name: _fill_in(torch, each, arrays) for name, each in example.items()})
    if isinstance(example, (list, tuple)):
        parts = [_fill_in(torch, each, arrays) for each in example]
        return type(example)(*parts) if hasattr(example, "_fields") else type(example)(parts)
    if is_dataclass(example) and not isinstance(example, type):
        values = {field.name: getattr(example, field.name) for field in fields(example)}
        return replace(example, **{name: _fill_in(torch, each, arrays) for name, each in values.items()})
    return example


def _find_synchronize() -> Callable[[], None]:
    """Return a function that synchronises the GPU if the user's code uses it."""
    cuda = import_torch().cuda
    return lambda: cuda.synchronize() if cuda.is_initialized() else None


# The network's inputs of each request, for export, calibration and comparison


def _store_inputs(requests: _InstrumentedApplication, journal: Journal) -> None:
    journal.stage("answer each request once")
    start, byte_count, count = time.monotonic(), 0, 0
    for index in range(min(len(requests.requests), MAX_REQUESTS)):
        requests.answer(index)
        count += 1
        byte_count += sum(array.nbytes for array in requests.recorded[-1][0].values()) * requests.calls
        if time.monotonic() - start > MAX_PASS_S or byte_count > MAX_BYTES:
            break
    calls = [feeds for feeds, _ in requests.recorded]
    shapes = dict.fromkeys(_describe(feeds) for feeds in calls)
    if len(shapes) > 1:
        examples = " and ".join([*shapes][:2])
        raise UserError(
            f"the network gets inputs of {add_noun(len(shapes), 'shape')} or types, such as {examples}; engines are "
            "compared on one: give requests, or a preprocess, that lead to one"
        )
    batch = next((array.shape[0] for array in calls[0].values() if array.ndim), 0)
    if not batch:
        raise UserError(f"the network gets {_describe(calls[0]) if calls[0] else 'no input'}; it needs a batch")
    if nan_name := next((name for feeds in calls for name, array in feeds.items() if (array != array).any()), ""):
        raise UserError(f"the network's input {nan_name!r} has values that are not numbers (NaN); correct preprocess")
    save_arrays(journal.folder / INPUTS_FILE, {name: _stack_rows(name, calls, batch) for name in calls[0]})
    journal.facts(application=ApplicationFacts(count, len(calls) // count, batch, len(requests.requests)))


def _stack_rows(name: str, calls: Sequence[Arrays], batch: int) -> np.ndarray:
    """Return an input's rows of all calls, or the input itself if it has no batch axis and stays the same."""
    arrays = [feeds[name] for feeds in calls]
    if arrays[0].ndim and len(arrays[0]) == batch:
        return np.concatenate(arrays)
    if any(not np.array_equal(arrays[0], each) for each in arrays[1:]):
        raise UserError(
            f"the network's input {name!r} is {_describe(arrays[0])}: it changes, and has no batch of {batch}"
        )
    return arrays[0]
