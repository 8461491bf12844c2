"""Released artefacts: package, containers and site build and contain what they name."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import dyno
import dyno as package

ROOT = Path(__file__).resolve().parents[1]


def run(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel and the source distribution."""
    out = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "hatchling", "build", "-d", out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def bare(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run the wheel's `dyno` in an environment with only its requirements."""
    place = tmp_path_factory.mktemp("bare")
    (wheel,) = built.glob("*.whl")
    uv = (sys.executable, "-m", "uv")
    assert run(*uv, "venv", "--python", sys.executable, place / "env").returncode == 0
    done = run(*uv, "pip", "install", "--offline", "--python", place / "env/bin/python", wheel)
    if done.returncode:
        pytest.skip(f"uv's cache lacks what the wheel requires: {done.stderr.splitlines()[-1]}")

    def call(*words: object, code: int = 0) -> str:
        done = run(place / "env/bin/dyno", *words, cwd=place)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    return call


def test_package_metadata_is_valid_and_the_version_is_consistent(built: Path) -> None:
    done = run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir())
    assert done.returncode == 0, done.stdout + done.stderr
    version = package.__version__
    assert {path.name for path in built.iterdir()} == {
        f"inference_dyno-{version}-py3-none-any.whl", f"inference_dyno-{version}.tar.gz",
    }  # fmt: skip
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert yaml.safe_load(RECIPE.read_text())["context"]["version"] == version


@pytest.mark.slow
def test_the_distributions_contain_the_required_files(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    pages = [path.name for path in (ROOT / "src/dyno/report/page").iterdir()]
    assert {"dyno/py.typed", *(f"dyno/report/page/{name}" for name in pages)} <= set(names)
    assert not [name for name in names if name.startswith("tests") or "__pycache__" in name]
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"SECURITY.md", "CITATION.cff", "CHANGELOG.md", "Makefile", "tests/test_release.py"} <= inside
    assert {".ci/run", ".github/workflows/release.yml", "conda/recipe/recipe.yaml"} <= inside
    assert {"docker/Dockerfile.gpu", "docker/compose.yaml", "docker/runs/.gitignore", ".dockerignore"} <= inside


def test_the_bare_wheel_tells_what_to_install(bare: Any) -> None:
    assert bare("--version").split()[-1] == package.__version__
    assert "run" in bare("--help")
    assert "pip install" in bare("doctor", code=3), "no backend can run"
    results = ROOT / "tests/golden/run"
    assert "fastest" in bare("show", results).lower()
    assert "inference-dyno[report]" in bare("report", results, "-o", "page", code=2)
    assert "inference-dyno[" in bare("run", "torchvision:resnet18", code=2)
    assert "inference-dyno[" in bare("demo", code=2)


@pytest.mark.parametrize("kind", ["run", "install"])
def test_uv_runs_and_installs_the_wheel_as_a_tool(kind: str, built: Path, tmp_path: Path) -> None:
    """Use `uvx --from WHEEL dyno` and `uv tool install WHEEL`; hints then name the tool's environment."""
    (wheel,) = built.glob("*.whl")
    env = {
        **os.environ,
        "UV_TOOL_DIR": str(tmp_path / "tools"),
        "UV_TOOL_BIN_DIR": str(tmp_path / "bin"),
        "UV_OFFLINE": "1",
    }
    tool = [sys.executable, "-m", "uv", "tool", kind, "--python", sys.executable]
    first = [*tool, "--from", wheel, "dyno", "--version"] if kind == "run" else [*tool, wheel]
    done = subprocess.run([*map(str, first)], env=env, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    if done.returncode and "offline" in done.stderr + "network was disabled":
        pytest.skip(f"uv's cache lacks what the wheel requires: {done.stderr.splitlines()[-1]}")
    if kind == "run":
        assert done.stdout.split()[-1] == package.__version__
        return
    run = ROOT / "tests/golden/run"
    done = subprocess.run(
        [tmp_path / "bin/dyno", "report", run, "-o", "page"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and f"uv pip install --python {tmp_path / 'tools/inference-dyno'} " in done.stderr


WORKFLOWS = ROOT / ".github/workflows"
RECIPE = ROOT / "conda/recipe/recipe.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_workflow(name: str) -> dict[Any, Any]:
    read: dict[Any, Any] = yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text())
    return read


def list_steps(workflow: dict[Any, Any], key: str) -> list[str]:
    return [str(step[key]) for job in workflow["jobs"].values() for step in job["steps"] if key in step]


@pytest.mark.parametrize("name", [path.stem for path in WORKFLOWS.iterdir()])
def test_workflows_call_existing_targets_and_default_to_read_only(name: str) -> None:
    workflow = read_workflow(name)
    assert workflow["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    matrix = [value for job in workflow["jobs"].values()
              for values in job.get("strategy", {}).get("matrix", {}).values() for value in values]  # fmt: skip
    called = {word for line in list_steps(workflow, "run") for word in re.findall(r"\bmake (\S+)", line)}
    made = {
        word for word in (called | ({*matrix} if any("$" in word for word in called) else set())) if "$" not in word
    }
    assert made and made <= targets
    # Actions have pinned versions, and no checkout leaves a token where a pull request's code runs.
    assert all(re.fullmatch(r"[\w.-]+/[\w./-]+@(v\d+|release/v\d+)", each) for each in list_steps(workflow, "uses"))
    checkouts = [
        step for job in workflow["jobs"].values() for step in job["steps"] if "checkout" in step.get("uses", "")
    ]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)
    # Names chosen by others reach a shell only through the environment.
    assert not [line for line in list_steps(workflow, "run") if "${{" in line.replace("${{ matrix.", "")]
    assert all(job["timeout-minutes"] <= 360 for job in workflow["jobs"].values())


def test_every_supported_python_is_tested() -> None:
    promised = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)}
    assert promised == {*read_workflow("ci")["jobs"]["check"]["strategy"]["matrix"]["python"]}
    assert min(promised, key=lambda each: int(each[2:])) == PROJECT["requires-python"].removeprefix(">=")
    assert {"check", "test"} <= read_workflow("ci")["jobs"].keys()


def test_a_tag_is_built_once_tested_and_published_without_a_token() -> None:
    workflow = read_workflow("release")
    assert workflow[True] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}  # YAML 1.1 reads `on` as true
    jobs = workflow["jobs"]
    assert jobs["test"]["strategy"]["matrix"] == {"libraries": ["floors", "newest"]}
    publish = jobs["publish"]
    assert {*publish["needs"]} == {"build", "test"} == jobs.keys() - {"publish"}
    assert publish["environment"] == "release" and "permissions" not in jobs["build"] | jobs["test"]
    assert publish["permissions"] == {"id-token": "write", "attestations": "write", "contents": "write"}
    used = [step.get("uses", "").partition("@")[0] for step in publish["steps"]]
    assert used[:3] == ["actions/download-artifact", "actions/attest-build-provenance", "pypa/gh-action-pypi-publish"]
    assert publish["steps"][2]["with"] == {"attestations": True}
    assert not any("hatchling" in step.get("run", "") for step in publish["steps"]), "what was tested is published"
    assert "secrets." not in (WORKFLOWS / "release.yml").read_text()


@pytest.mark.parametrize(
    ("tag", "repository", "problem"),
    [("v{version}", "{url}", ""), ("v9.9.9", "{url}", "version is v"), ("v{version}", "https://x/y", "Repository is ")],
)
def test_wrong_tags_and_repositories_are_not_released(tag: str, repository: str, problem: str) -> None:
    (check,) = [line for line in list_steps(read_workflow("release"), "run") if "tomllib" in line]
    known = {"version": PROJECT["version"], "url": PROJECT["urls"]["Repository"]}
    env = {"TAG": tag.format(**known), "REPOSITORY": repository.format(**known)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", check], cwd=ROOT, env={**os.environ, **env, "PATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, problem in done.stderr) == (bool(problem), True), done.stderr


def test_the_conda_recipe_has_the_requirements_of_the_wheel() -> None:
    recipe = yaml.safe_load(RECIPE.read_text())
    required, (python, linux, *others) = PROJECT["dependencies"], recipe["requirements"]["run"]
    assert others == [each.replace(">=", " >=") for each in sorted(required)]
    assert f">={recipe['context']['python_min']}" == PROJECT["requires-python"]
    assert (python, linux) == ("python >=${{ python_min }}", "__linux"), "and no other system"
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {each.replace(">=", " >=") for each in build} <= {*recipe["requirements"]["host"]}
    assert recipe["build"]["python"]["entry_points"] == [f"{k} = {v}" for k, v in PROJECT["scripts"].items()]
    assert recipe["package"]["name"] == PROJECT["name"] and recipe["about"]["summary"] == PROJECT["description"]
    assert recipe["about"]["license"] == PROJECT["license"] and (ROOT / recipe["about"]["license_file"]).is_file()


def test_every_file_names_the_same_repository() -> None:
    url = PROJECT["urls"]["Repository"]
    assert all(each.startswith(url) for each in PROJECT["urls"].values())
    about = yaml.safe_load(RECIPE.read_text())["about"]
    assert {about["homepage"], about["repository"]} == {url}
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["repository-code"] == url
    (used,) = re.findall(r"uses: (\S+)/action@", (ROOT / "docs/ci.md").read_text())
    assert url.endswith(f"/{used}")


FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix[1:])
def test_docker_images_use_existing_files_and_extras(file: Path) -> None:
    text = file.read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.M)
    assert set(wanted.split(",")) <= set(extras) and "video" not in wanted, "FFmpeg's parts under the GPL stay out"
    copied = [each for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M) for each in line.split()]
    seen = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied and all((ROOT / each).exists() and each in seen for each in copied)
    assert re.search(r"^USER dyno$", text, re.M) and re.search(r'^HEALTHCHECK .*"dyno", "doctor"', text, re.M)


def test_the_gpu_image_has_the_tested_onnx_runtime_version() -> None:
    (version,) = re.findall(r"^onnxruntime(==.+)$", (ROOT / "tools/constraints.txt").read_text(), re.M)
    assert f"\nARG ORT=onnxruntime-gpu{version}\n" in (ROOT / "docker/Dockerfile.gpu").read_text()


def test_user_dependencies_have_no_upper_bound() -> None:
    """Installing Dyno must never downgrade a library; `make setup` has separate constraints."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        each for name, one in project["optional-dependencies"].items() if name not in ("dev", "docs") for each in one
    ]
    bounded = [each for each in (*project["dependencies"], *extras) if re.search("[<~]|==|!=", each)]
    assert not bounded and "<" not in project["requires-python"]


def test_compose_services_use_the_dockerfiles() -> None:
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    built = {
        (ROOT / "docker" / each["build"]["context"] / each["build"]["dockerfile"]).resolve()
        for each in services.values()
    }
    assert built == set(FILES)
    assert services["cpu"]["command"][0] == "demo" and "/models:ro" in services["gpu"]["volumes"][1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", place],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return place


def test_every_page_of_the_documentation_is_in_the_menu(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    menu = set(re.findall(r"[\w/-]+(?=\.md$)", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert pages <= menu
    assert all((site / f"{page}.html").is_file() for page in menu)


@pytest.mark.rare
def test_the_site_loads_no_external_resources(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|iframe)[^>]*\bsrc="?(https?:[^" >]*)', page.read_text())
        fetched += re.findall(r'<link[^>]*rel="?stylesheet"?[^>]*href="?(https?:[^" >]*)', page.read_text())
        assert not fetched, page.name
    assert (site / "assets/iframe-worker.js").is_file()


@pytest.mark.rare
def test_reference_pages_are_generated_from_the_code(site: Path) -> None:
    commands = (site / "reference/commands.html").read_text()
    for command in ("dyno run", "dyno bench video", "dyno data imagenet-val"):
        assert f">{command}<" in commands
    assert "--rounds" in commands and "--help-all" in commands
    pages = {name: (site / f"reference/{name}.html").read_text() for name in ("study", "columns", "records")}
    assert "<code>--rounds</code>" in pages["study"] and "<code>latency_model_ms_p99</code>" in pages["columns"]
    assert 'id="record"' in pages["records"] and "<code>Trial | None</code>" in pages["records"]
    assert (
        'href="results/turns.html"' in (site / "results.html").read_text() and (site / "results/turns.html").is_file()
    )
    python = (site / "reference/python.html").read_text()
    assert all(f'id="{getattr(dyno, name).__module__}.{name}"' in python for name in ("Study", "load", "explain"))
    assert "Exactly this many rounds" in python and 'id="dyno.api.Study.run"' in python
