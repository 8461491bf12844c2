"""Backends that run a wrong graph: weights changed after export, or another branch of the module."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dyno.worker.backend import Session
from dyno.worker.backends.onnx_runtime import OnnxRuntime
from dyno.worker.backends.open_vino import OpenVino
from dyno.worker.backends.pytorch import PyTorch
from dyno.worker.spec import Artifact, Trial

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.a, self.b = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3)
        self.head, self.other = nn.Linear(16, 10), False
    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = self.b(x) if self.other else self.a(x)
        return self.head(torch.relu(x).mean((2, 3)))

def net(): return Net()
"""


class ChangedWeight(OnnxRuntime):
    """ONNX Runtime with the file's largest float weight multiplied by 1.5; without any, an int8 weight is negated."""

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        import onnx

        assert artifact is not None
        model = onnx.load(artifact.path)
        floats = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT and len(t.dims) == 4]
        largest = max(floats, key=lambda t: np.prod(t.dims), default=None)
        quantised = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 4]
        chosen = largest or max(quantised, key=lambda t: np.prod(t.dims))
        array = onnx.numpy_helper.to_array(chosen)
        changed = -array if largest is None else (array * 1.5).astype(array.dtype)
        chosen.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(changed), chosen.name))
        path = Path(tempfile.mkdtemp()) / "model.onnx"
        onnx.save(model, path)
        return super().load(trial, replace(artifact, path=str(path)))


class WrongPairs(ChangedWeight):
    """ONNX Runtime with the changed weight at batch 2 only."""

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        return super().load(trial, artifact) if trial.dims.batch == 2 else OnnxRuntime.load(self, trial, artifact)


class ChangedBlob(OpenVino):
    """OpenVINO with the weights in the middle of the file reversed."""

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        assert artifact is not None
        source, target = Path(artifact.path), Path(tempfile.mkdtemp()) / "model.xml"
        target.write_bytes(source.read_bytes())
        blob = np.frombuffer(source.with_suffix(".bin").read_bytes(), np.uint8).copy()
        begin, end = (int(len(blob) * share) // 4 * 4 for share in (0.3, 0.7))
        middle = blob[begin:end].view(np.int8 if trial.precision == "int8" else np.float32)
        middle[:] = middle[::-1].copy()
        target.with_suffix(".bin").write_bytes(blob.tobytes())
        return super().load(trial, replace(artifact, path=str(target)))


class OtherBranch(PyTorch):
    """PyTorch running the other branch of the module."""

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        session: Any = super().load(trial, artifact)
        session._module.other = True
        return session
