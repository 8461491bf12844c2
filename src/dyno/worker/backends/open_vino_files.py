"""OpenVINO's files, an IR of .xml and .bin: made from an ONNX file, or the user's own."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from pathlib import Path

from dyno.worker.backend import FileContents, FileFormat, Maker
from dyno.worker.backends.open_vino import library, read_model, tensors_of, version
from dyno.worker.backends.open_vino_layers import plain
from dyno.worker.facts.files import MadeBy
from dyno.worker.makers.precision import INHERITED
from dyno.worker.nets import file_images, task_facts
from dyno.worker.spec import Artifact, Recipe, Trial, UserError

KEPT = "framework"  # the entry of an IR's information under which OpenVINO keeps an ONNX file's metadata


class IRFormat(FileFormat):
    """An IR: the graph in .xml, its weights beside it in .bin."""

    name = "openvino"
    suffixes = (".xml",)
    backend = "openvino"
    builders = ("openvino",)

    def companions(self, path: Path) -> list[Path]:
        return [path.with_suffix(".bin")]

    def read(self, path: str, trial: Trial) -> FileContents:
        """Its precision is int8 when it is quantised, else fp32, whatever type its weights are stored in.

        OpenVINO keeps the metadata of the ONNX file that it was made of.
        """
        model = read_model(library(), path)
        quantised = any(op.get_type_name() == "FakeQuantize" for op in model.get_ops())
        inputs, outputs = tensors_of(model.inputs), tensors_of(model.outputs)
        kept = model.get_rt_info([KEPT]).value if model.has_rt_info([KEPT]) else {}
        metadata = {key: str(plain(value)) for key, value in kept.items()}
        return FileContents(
            inputs, outputs, "int8" if quantised else "fp32", task=task_facts.read(metadata),
            image=file_images.read(metadata),
        )  # fmt: skip


class IRMaker(Maker):
    """Converts an ONNX file, weights as they are, or points to the model's own IR."""

    name = "openvino"
    requires = ("openvino",)

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        """Write FOLDER/model.xml and model.bin; the sha256 is over both, .xml first.

        Raises `UserError` for a file that OpenVINO can't read.
        """
        ov = library()
        made_by = MadeBy(backend=self.name, options=dict(recipe.options), versions={"openvino": version()})
        began = time.perf_counter()
        if recipe.model.file.endswith(".xml"):
            path, seconds, parent_sha256 = Path(recipe.model.file), 0.0, ""
            contents = IR.read(str(path), Trial(recipe.model, self.name, recipe.precision, recipe.dims))
            inputs, outputs = contents.inputs, contents.outputs
        elif parent is None:
            raise UserError("an OpenVINO IR is made from an ONNX file: give one, or a PyTorch model")
        else:
            path, parent_sha256 = folder / "model.xml", parent.sha256
            ov.save_model(read_model(ov, parent.path), path, compress_to_fp16=False)
            seconds = time.perf_counter() - began
            inputs, outputs = parent.inputs, parent.outputs
            made_by = replace(made_by, **parent.made_by.set_fields(INHERITED))
        written = [path.read_bytes(), *(part.read_bytes() for part in IR.companions(path))]
        sha256 = hashlib.sha256(b"".join(written)).hexdigest()
        if parent is None:
            # Nobody knows what it was made of: it is comparable with itself alone.
            made_by = replace(made_by, weights_sha256=sha256)
        size = sum(map(len, written))
        return Artifact(
            IR.name, str(path), sha256, size, recipe.precision, inputs, outputs, seconds, parent_sha256, made_by
        )


IR = IRFormat()
IR_MAKER = IRMaker()
