"""ONNX files: read, copied with their external weights, and exported by `dyno export`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from dyno.worker.backend import FileContents, FileFormat
from dyno.worker.makers.precision import converted
from dyno.worker.nets import file_images, flops, task_facts
from dyno.worker.onnx_graph import file, weights
from dyno.worker.spec import Recipe, Trial


class OnnxFormat(FileFormat):
    """An ONNX graph, and the files beside it that hold its larger weights."""

    name = "onnx"
    suffixes = (".onnx",)
    backend = "onnxruntime"

    def companions(self, path: Path) -> list[Path]:
        return weights.beside(path) if path.is_file() else []

    def copy(self, made: Path, out: Path) -> None:
        weights.copy(made, out)

    def recipe(self, trial: Trial) -> Recipe:
        """Return the file's recipe for the engine in the option `target`, with a free batch where the trial's is 0."""
        return converted(trial, str(trial.options.get("target", "onnxruntime")), trial.dims.batch)

    def read(self, path: str, trial: Trial) -> FileContents:
        """Read the file; raise a `UserError` also for a graph that ONNX's own checker refuses."""
        inputs, outputs = file.read_io(path)
        if inputs:
            file.check(path)
        metadata, facts = file.read_metadata(path), file.read_facts(path)
        return FileContents(
            inputs,
            outputs,
            facts.precision,
            parameters=facts.parameters,
            task=task_facts.read(metadata),
            image=file_images.read(metadata),
            flops=partial(flops.of_onnx, path),
        )


ONNX = OnnxFormat()
