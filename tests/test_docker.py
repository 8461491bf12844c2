"""What the files in docker/ name exists: extras, copied files, services."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix[1:])
def test_an_image_copies_what_there_is_and_installs_extras_that_exist(file: Path) -> None:
    text = file.read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.M)
    assert set(wanted.split(",")) <= set(extras) and "video" not in wanted, "FFmpeg's parts under the GPL stay out"
    copied = [each for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M) for each in line.split()]
    seen = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied and all((ROOT / each).exists() and each in seen for each in copied)
    assert re.search(r"^USER dyno$", text, re.M) and re.search(r'^HEALTHCHECK .*"dyno", "doctor"', text, re.M)


def test_onnx_runtime_for_gpus_has_the_version_of_the_extra() -> None:
    (extra,) = re.findall(r'"onnxruntime(==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert f"\nARG ORT=onnxruntime-gpu{extra}\n" in (ROOT / "docker/Dockerfile.gpu").read_text()


def test_the_services_are_built_from_these_files() -> None:
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    built = {
        (ROOT / "docker" / each["build"]["context"] / each["build"]["dockerfile"]).resolve()
        for each in services.values()
    }
    assert built == set(FILES)
    assert services["cpu"]["command"][0] == "demo" and "/models:ro" in services["gpu"]["volumes"][1]
