"""A backend outside Dyno with a builder that makes a different engine each time and can be told to fail."""

import ast
import hashlib
from pathlib import Path

from dyno.worker.backend import Maker, Session
from dyno.worker.backends.fake import Fake
from dyno.worker.spec import Artifact, Recipe, Tensor, Trial


class Builder(Maker):
    name = "drawn_engine:Builder"

    def make(self, recipe: Recipe, parent: Artifact | None, folder: Path) -> Artifact:
        path, content = Path(folder) / "engine.bin", repr(sorted(recipe.options.items())).encode()
        if recipe.options.get("build") == recipe.options.get("fails", -1):
            raise ValueError("this build failed")
        path.write_bytes(content)
        ends = (Tensor("input", "float32", (1, 1, 8, 8)),)
        return Artifact("bin", str(path), hashlib.sha256(content).hexdigest(), len(content), "fp32", ends, ends, 0.0)


class Engine(Fake):
    """Scripted engine; with `uneven`, every second build runs a thousand times as long, far above machine noise."""

    name = "drawn_engine:Engine"
    options = (*Fake.options, "kind", "uneven", "fails", "build", "timing_cache")

    def recipe(self, trial: Trial) -> Recipe:
        own = {name: trial.options[name] for name in self.options if name in trial.options}
        return Recipe("drawn_engine:Builder", "bin", "fp32", trial.model, trial.dims, own)

    def load(self, trial: Trial, artifact: Artifact | None) -> Session:
        assert artifact is not None
        built = dict(ast.literal_eval(Path(artifact.path).read_text()))
        assert built["kind"] == trial.options["kind"]
        session = super().load(trial, artifact)
        if trial.options.get("uneven") and built["build"] % 2 == 0:
            session.latency_s *= 1000.0
        return session
