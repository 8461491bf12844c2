"""An engine that the user gives: nothing is built; it is deserialised where it will run, and described."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dyno.worker.backends.tensor_rt import layers, library
from dyno.worker.gpu import Device
from dyno.worker.spec import Artifact, Recipe


def given(product: str, recipe: Recipe) -> Artifact:
    """The model's own engine as an artifact: its tensors, layers and hash.

    Raises `UserError` with the library's reason for one of another version or GPU, or no engine at all; `Unavailable`
    without a GPU, as only there an engine can be read.
    """
    from dyno.worker.backends.tensor_rt.run import deserialised, tensors

    trt, device = library.load(product), Device(recipe.runtime.device)
    try:
        path = Path(recipe.model.file)
        runtime, engine = deserialised(trt, library.Log(trt), str(path))
        listed = layers.inspect(trt, engine)
        inputs, outputs = tensors(trt, engine)
        del engine, runtime
        gpu = {"model": device.model, "capability": device.capability}
    finally:
        device.close()
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    found = layers.summary(listed, recipe.precision)
    made_by = {
        "backend": recipe.maker,
        "options": {},
        "versions": {library.INSTALL[product]: trt.__version__},
        "gpu": gpu,
        "weights_sha256": sha256,  # nobody knows what it was made of: it is comparable with itself alone
        "warnings": [] if found["precision_truth"]["ok"] else [found["precision_truth"]["sentence"]],
        "notes": layers.notes(listed, recipe.precision),
        **found,
    }
    return Artifact("engine", str(path), sha256, len(content), recipe.precision, inputs, outputs, 0.0, "", made_by)
