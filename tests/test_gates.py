"""The architecture's rules as tests; each checker must also fail on a bad sample."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest

import rooms

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
MAX_FUNCTION = 60
MAY_IMPORT = rooms.may_import()

# Missing from the standard library of some Python between 3.10 and today.
NOT_EVERYWHERE = {"tomllib", "distutils", "imp", "asyncore", "asynchat", "smtpd"}
LIBRARIES = set(
    "numpy torch torchvision timm onnx onnxruntime onnxscript onnxconverter_common openvino tensorrt tensorrt_rtx "
    "torch_tensorrt modelopt cuda ultralytics pandas scipy matplotlib jinja2 sklearn skimage PIL cv2 av typer rich "
    "psutil pynvml safetensors yaml".split()
)
HEAVY = set(
    "numpy torch pandas scipy matplotlib onnx onnxruntime onnxscript openvino sklearn PIL timm torchvision".split()
)

# With brackets, so that the pattern doesn't match itself.
MACHINE = re.compile(rb"p[y]pi\.org|python[h]osted|/wor[k]/|/roo[t]/|registry\.n[p]m|deb\.d[e]bian")


parse = lru_cache(maxsize=1)(ast.parse)  # parse each file once for all checks


def module_name(path: Path) -> str:
    """Return the dotted module name of a file below src/."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(nodes: Iterable[ast.AST], package: str) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of each import in the nodes; relative imports count from `package`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def walk(tree: ast.AST, functions: bool = False) -> Iterator[ast.AST]:
    """Yield nodes that run on import, or with `functions` ever; `if TYPE_CHECKING` blocks are skipped, as types are no
    runtime dependency."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not functions:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from walk(node, functions)


def inside(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def foreign_to_worker(source: str, module: str, package: str) -> list[str]:
    """Return module-level imports that fail in a Python with only numpy."""
    bad = []
    for line, name in imports(walk(parse(source)), package):
        first = name.split(".")[0]
        standard = first in sys.stdlib_module_names and first not in NOT_EVERYWHERE
        if not (standard or first == "numpy" or inside(name, ("dyno.worker",))):
            bad.append(f"{module}:{line} imports {name}")
    return bad


def against_direction(source: str, module: str, package: str) -> list[str]:
    """Return dyno imports against the architecture, anywhere in the module except for types."""
    rule = max((prefix for prefix in MAY_IMPORT if inside(module, (prefix,))), key=len)
    return [
        f"{module}:{line} imports {name}"
        for line, name in imports(walk(parse(source), functions=True), package)
        if name.split(".")[0] == "dyno" and not inside(name, MAY_IMPORT[rule])
    ]


def newer_than_310(source: str) -> str:
    """Return Python 3.10's syntax error for the source, or ""."""
    try:
        ast.parse(source, feature_version=(3, 10))
    except SyntaxError as e:
        return str(e)
    return ""


def too_long(source: str, name: str) -> list[str]:
    """Return the functions with too many lines."""
    bad = []
    for node in ast.walk(parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION:
                bad.append(f"{name}: {node.name} has {length} lines")
    return bad


def shadows(names: list[str], imported: set[str]) -> list[str]:
    """Return module names that would shadow another library for a script in their folder."""
    return sorted(set(names) & (set(sys.stdlib_module_names) | LIBRARIES | imported))


def heavy_after(code: str) -> set[str]:
    """Return the heavy libraries loaded by the code in a fresh interpreter."""
    code += "\nimport sys; print('loaded:', *{m.split('.')[0] for m in sys.modules}, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=1200)
    return HEAVY & set(done.stderr.rpartition("loaded:")[2].split())


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def package_of(path: Path) -> str:
    name = module_name(path)
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


CHECKS: dict[str, dict[str, Callable[[str, Path], Iterable[str]]]] = {
    "src/dyno/worker": {
        "foreign": lambda text, path: foreign_to_worker(text, module_name(path), package_of(path)),
        "newer": lambda text, path: [f"{path}: {e}"] if (e := newer_than_310(text)) else [],
    },
    "src/dyno": {
        "direction": lambda text, path: against_direction(text, module_name(path), package_of(path)),
        "imported": lambda text, path: (name for _, name in imports(ast.walk(parse(text)), package_of(path))),
        "vague": lambda text, path: vague_variables(text, str(path.relative_to(ROOT))),
    },
    ".": {
        "long": lambda text, path: too_long(text, str(path.relative_to(ROOT))),
        "misnamed": lambda text, path: misnamed(text, str(path.relative_to(ROOT))),
        "limits": lambda text, path: unusual_limits(text, str(path.relative_to(ROOT))),
    },
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Findings of each check, with every file read once."""
    lines: dict[str, list[str]] = defaultdict(list)
    assert sources("src/dyno/worker"), "the folder moved"
    for path in sources("src", "tests", "benchmarks"):
        text = path.read_text(encoding="utf-8")
        for folder, checks in CHECKS.items():
            for name, check in checks.items() if path.is_relative_to(ROOT / folder) else ():
                lines[name] += check(text, path)
    return lines


def test_the_worker_imports_only_numpy(found: dict[str, list[str]]) -> None:
    assert not found["foreign"]


@pytest.mark.parametrize(
    "bad",
    [
        "import torch",
        "from onnx import helper",
        "import tomllib",
        "try:\n    import pandas\nexcept ImportError:\n    pandas = None",
        "class A:\n    import psutil",
        "from dyno import store",
        "from dyno.jobs.launcher import spawn",
    ],
)
def test_foreign_imports_are_detected(bad: str) -> None:
    assert len(foreign_to_worker(bad, "dyno.worker.x", "dyno.worker")) == 1


def test_imports_inside_worker_functions_are_allowed() -> None:
    good = "import json\nimport numpy as np\nfrom dyno.worker import spec\ndef load():\n    import torch\n"
    assert foreign_to_worker(good, "dyno.worker.x", "dyno.worker") == []


def test_worker_is_python_310(found: dict[str, list[str]]) -> None:
    assert not found["newer"]
    assert newer_than_310("try:\n    pass\nexcept* ValueError:\n    pass")


def test_worker_imports_in_another_python(other_python: str) -> None:
    names = [module_name(path) for path in sources("src/dyno/worker")]
    code = f"import sys; sys.path.insert(0, {str(SRC)!r})\nfor name in {names!r}: __import__(name)"
    done = subprocess.run([other_python, "-I", "-c", code], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr


def test_imports_follow_the_layering(found: dict[str, list[str]]) -> None:
    assert not found["direction"]


@pytest.mark.parametrize(
    ("module", "bad"),
    [
        ("dyno.report.tables.trial_table", "from dyno.jobs import launcher"),
        ("dyno.report.tables.trial_table", "def f():\n    from dyno.worker.registry import find"),
        ("dyno.report.tables.trial_table", "from ...store import Run"),
        ("dyno.results.metrics.accuracy", "from dyno.report.tables import render"),
        ("dyno.worker.main", "from dyno.study.study import Study"),
        ("dyno.worker.spec", "from dyno.worker.record import Record"),
        ("dyno.worker.inputs.specs", "from dyno.worker.nets.models import loaded"),
        ("dyno.data.folders", "import dyno.worker.measure"),
        ("dyno.data", "from dyno.worker import backend"),
        ("dyno.study.study", "def run():\n    from dyno.runner.execute import execute"),
        ("dyno.study.study", "from dyno.worker import measure"),
        ("dyno.study.plan", "from dyno.runner import execute"),
        ("dyno.runner.execute", "import dyno.worker.backends.pytorch"),
        ("dyno", "from dyno.cli import app"),
    ],
)
def test_an_import_against_the_direction_is_seen(module: str, bad: str) -> None:
    assert len(against_direction(bad, module, module.rpartition(".")[0])) == 1


def test_allowed_directions_pass() -> None:
    assert against_direction("from dyno.worker.spec import Trial", "dyno.report.tables.x", "dyno.report.tables") == []
    assert against_direction("from dyno.worker import backend, spec", "dyno.runner.execute", "dyno.runner") == []
    assert against_direction("from dyno.results import rounds", "dyno.cli.app", "dyno.cli") == []
    assert against_direction("from .spec import Trial", "dyno.worker.measure", "dyno.worker") == []
    typed = "if TYPE_CHECKING:\n    from dyno.api import Result"
    assert against_direction(typed, "dyno.study.study", "dyno") == []


def test_every_module_is_in_the_architecture() -> None:
    places = [place for _, place in rooms.rooms()]
    homeless = [
        path
        for path in sources("src/dyno")
        if path.name not in ("__init__.py", "__main__.py") and not any(path == p or p in path.parents for p in places)
    ]
    assert homeless == []


def test_architecture_layers_have_no_cycles() -> None:
    for table in (rooms.HOST, rooms.WORKER):
        above: list[str] = []
        for room, below in table.items():
            assert set(below.split()) <= set(above), f"{room} stands above {below}"
            above.append(room)


def test_the_architecture_page_matches_the_code() -> None:
    text = rooms.PAGE.read_text(encoding="utf-8")
    assert rooms.generated() in text, "run python tools/rooms.py"


def test_no_module_hides_another(found: dict[str, list[str]]) -> None:
    files = sources("src/dyno")
    names = [path.stem for path in files if path.name != "__init__.py"]
    names += [path.parent.name for path in files if path.name == "__init__.py" and path.parent != SRC / "dyno"]
    assert shadows(names, {name.split(".")[0] for name in found["imported"]} - {"dyno"}) == []
    assert shadows(["types", "onnxruntime", "stats", "somelib"], {"somelib"}) == ["onnxruntime", "somelib", "types"]


def test_no_function_is_too_long(found: dict[str, list[str]]) -> None:
    assert not found["long"]


def test_long_functions_are_detected() -> None:
    body = "    x = 1\n" * MAX_FUNCTION
    assert too_long("def f():\n" + body, "a.py") == [f"a.py: f has {MAX_FUNCTION + 1} lines"]
    assert too_long("class A:\n    async def g(self):\n" + "        x = 1\n" * MAX_FUNCTION, "a.py")
    assert too_long("def f():\n    x = 1\n" * 400, "a.py") == []


def misnamed(text: str, path: str) -> list[str]:
    """Return functions named `is_` or `has_` with a return type other than a boolean."""
    functions = (node for node in ast.walk(parse(text)) if isinstance(node, ast.FunctionDef) and node.returns)
    named = (node for node in functions if node.name.lstrip("_").startswith(("is_", "has_")))
    return [f"{path}: {node.name}" for node in named if not re.search("bool|TypeGuard", ast.unparse(node.returns))]


def test_names_with_is_or_has_return_booleans(found: dict[str, list[str]]) -> None:
    assert not found["misnamed"]
    assert misnamed("def _is_late() -> str: ...\ndef has_a() -> bool: ...", "a.py") == ["a.py: _is_late"]


def unusual_limits(text: str, path: str) -> list[str]:
    """List constants that limit something without the field's prefixes, MIN_ and MAX_."""
    return [f"{path}: {name}" for name in re.findall(r"^_?((?:MOST|LEAST|LONGEST|LARGEST)_\w+)", text, re.MULTILINE)]


def test_limits_are_called_min_and_max(found: dict[str, list[str]]) -> None:
    assert not found["limits"]
    assert unusual_limits("MOST_ROWS = 8\nMAX_ROWS = 8", "a.py") == ["a.py: MOST_ROWS"]


# Words that describe a variable instead of naming it; DESIGN asks for nouns of the field.
VAGUE = frozenset(
    "about again aside asked at besides both chosen drawn every found heard held how inside listed looked made moved "
    "named none of once ran said seen since such there told usual what whatever whole whose why".split()
)


def vague_variables(text: str, path: str) -> list[str]:
    """List functions' variables that are named by such a word."""
    functions = (node for node in ast.walk(parse(text)) if isinstance(node, ast.FunctionDef))
    names = (node for function in functions for node in ast.walk(function) if isinstance(node, ast.Name))
    return [f"{path}:{n.lineno}: {n.id}" for n in names if isinstance(n.ctx, ast.Store) and n.id in VAGUE]


def test_variables_are_named_by_nouns(found: dict[str, list[str]]) -> None:
    assert not found["vague"]
    assert vague_variables("def f():\n    if x:\n        found = 1\n        matches = 2\n", "a.py") == ["a.py:3: found"]


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys; sys.argv = ['dyno', '--help']\nfrom dyno.cli.app import main\ntry: main()\nexcept SystemExit: pass"
    )
    assert heavy_after(code) == set()
    assert heavy_after("import pandas") >= {"pandas"}


def git(*words: str) -> bytes:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=True, timeout=1200).stdout


def test_no_file_names_a_machine() -> None:
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0")
    files = [path for name in names if name and (path := ROOT / name).is_file()]
    assert files, "git lists no file"
    found = {str(path.relative_to(ROOT)): m.group() for path in files if (m := MACHINE.search(path.read_bytes()))}
    assert not found


@pytest.mark.parametrize("bad", [b"https://p" + b"ypi.org/simple", b"cd /wor" + b"k/main", b"see /roo" + b"t/.cache"])
def test_machine_specific_paths_are_detected(bad: bytes) -> None:
    assert MACHINE.search(b"text before " + bad + b" and after")


def test_lock_file_stays_out_of_git() -> None:
    assert git("ls-files", "uv.lock", "**/uv.lock") == b""
    assert git("check-ignore", "uv.lock").strip() == b"uv.lock"


def test_no_package_hides_a_public_name() -> None:
    """Importing `dyno.x` sets the package's attribute x, which would replace a public function x."""
    import dyno

    assert not {path.stem for path in (SRC / "dyno").iterdir()} & set(dyno.__all__)


def test_every_test_file_is_in_exactly_one_group() -> None:
    groups = ("test-program", "test-engines", "test-jobs")
    done = subprocess.run(["make", "-n", *groups], cwd=ROOT, capture_output=True, text=True, check=True)
    named = [ROOT / word for word in done.stdout.split() if word.startswith("tests/") and word != "tests/one_server.py"]
    files = [file for path in named for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    assert sorted(files) == sorted((ROOT / "tests").rglob("test_*.py"))
