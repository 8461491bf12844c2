"""A script that runs a trial's model in the trial's own library, as the trial ran it, without Dyno.

Each has the same parts: constants for the settings, `load()`, and `run(model, feeds)`; where the model's one input is
an image also `prepare(path)`, which preprocesses a photograph as in the measurement.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dyno.worker import plugins
from dyno.worker.snippets.parts import Script, inputs_of, written
from dyno.worker.spec import Artifact, Trial, UserError

GROUP = "dyno.scripts"


def write(trial: Trial, artifact: Artifact | None, about: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """Write script.py into the folder, and beside it what a module needs: state.pt, and model.py where it is a copy.

    `about` has the name of the `file` beside the script, the trial's `outputs` by name, the engine's `options` as it
    ran, and the `story` for the script's docstring. Returns the names of the files that were written. `UserError` for a
    backend without scripts.
    """
    scripts = plugins.declared(sys.modules[__name__], Script, GROUP)
    if trial.backend not in scripts:
        raise UserError(f"there is no script for {trial.backend}; one can be written for {', '.join(scripts)}")
    part = scripts[trial.backend].part(trial, artifact, about, folder)
    text = written(part, trial, inputs_of(trial, artifact), about)
    (folder / "script.py").write_text(text, encoding="utf-8")
    return tuple(sorted(path.name for path in folder.iterdir() if path.name in ("script.py", "state.pt", "model.py")))
