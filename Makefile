# Everything from a fresh clone: needs python3 (3.11 or newer), make and a package index, nothing else.
PYTHON ?= python3
VENV := .venv
OTHER := .venv-other
FLOORS := .venv-floors
NEWEST := .venv-newest
BIN := $(VENV)/bin
UV := $(BIN)/uv
READY := $(VENV)/.ready
ENGINES_READY := $(VENV)/.ready-engines
OTHER_READY := $(OTHER)/.ready
RUNS ?= runs
# The tests run in three processes side by side, since jobs often wait: those of the whole program, those that load engines
# into the process, and those that start jobs. Some files stand with another group than the rest of their folder, so that
# all three end together. They fork what they start from one server.
LOADING := tests/test_contract.py
STARTING := $(addprefix tests/,test_api.py test_evaluation.py test_winner.py regression/test_selftest.py serving/test_session.py)
READING := $(addprefix tests/study/,test_in_memory.py test_input_options.py test_study.py)
PROGRAM := $(filter-out $(LOADING) $(STARTING),$(wildcard $(addsuffix test_*.py,tests/ tests/regression/ tests/serving/))) tests/data tests/packs tests/video $(READING)
ENGINES := $(addprefix tests/,gpu layers report results trtexec worker) $(LOADING)
JOBS := $(addprefix tests/,cli devices jobs runner training) $(filter-out $(READING),$(wildcard tests/study/test_*.py)) $(STARTING)
FAST := -q -m "not slow and not gpu"
USUAL := -m "not rare"

# A PYTHONPATH, an activated environment or an exported width of the caller's must not decide what is tested here. The
# byte-code of what is tested is kept: the tests start hundreds of processes, and each would compile it anew.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX PYTHONDONTWRITEBYTECODE COLUMNS LINES
export UV_PYTHON_DOWNLOADS := never
export UV_HTTP_TIMEOUT ?= 300
# Threads that wait by spinning take the processors from the process beside them: a quarter of make check's time.
test test-all check floors newest: export OMP_WAIT_POLICY = PASSIVE

.DEFAULT_GOAL := help

.PHONY: help setup demo test test-all test-program test-engines test-jobs check style floors newest bench site format clean distclean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) $(OTHER_READY)  ## make .venv with everything in it, and .venv-other where another Python is found

demo: $(if $(wildcard $(READY)),$(READY),$(ENGINES_READY))  ## the whole job on scikit-learn's digits, into runs/demo
	$(BIN)/dyno demo

# What PYTEST has goes last: another -m there decides.
test: setup  ## the tests, but for those that take long
	@$(MAKE) --no-print-directory test-all PYTEST='$(USUAL) $(PYTEST)'

test-all: setup  ## every test, in three processes in parallel; up to three failures of each run again, alone
	@$(BIN)/python tests/one_server.py $(MAKE) --no-print-directory -j3 --output-sync=line --keep-going \
	  test-program test-engines test-jobs

test-program:
	$(BIN)/python tests/one_server.py group program $(PYTEST) $(PROGRAM)

test-engines:
	$(BIN)/python tests/one_server.py group engines $(PYTEST) $(ENGINES)

test-jobs:
	$(BIN)/python tests/one_server.py group jobs $(PYTEST) $(JOBS)

check: setup  ## format, lint, types and the fast tests
	@$(MAKE) --no-print-directory -j4 --output-sync=line --keep-going PYTEST='$(FAST)' style test-program test-engines test-jobs

style:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# $(1): an environment, $(2): the file of what is in it besides Dyno.
define test-versions
	$(UV) venv --quiet --clear --python $(BIN)/python $(1)
	$(UV) pip install --python $(1)/bin/python --compile-bytecode -r $(2)
	$(UV) pip install --python $(1)/bin/python --no-deps -e .
	@$(1)/bin/python tests/one_server.py $(MAKE) --no-print-directory -j3 --output-sync=line --keep-going \
	  BIN=$(1)/bin PYTEST='$(FAST)' test-program test-engines test-jobs
endef
COMPILE := pip compile --quiet --upgrade --python $(BIN)/python --all-extras --no-header --no-annotate

# Of each library the lowest version that has a wheel for this Python: an older one would have to be compiled. Of
# TensorRT-RTX none has; its source only fetches the libraries.
floors: setup  ## the fast tests with the lowest versions that pyproject.toml allows, in .venv-floors
	@mkdir -p build
	$(UV) $(COMPILE) --resolution lowest-direct --only-binary :all: --no-binary tensorrt-rtx --no-binary tensorrt-rtx-cu13 \
	  -o build/floors.txt pyproject.toml
	$(call test-versions,$(FLOORS),build/floors.txt)

newest: setup  ## the fast tests with the newest versions that the index has, in .venv-newest
	@mkdir -p build
	$(UV) $(COMPILE) -o build/newest.txt pyproject.toml
	$(call test-versions,$(NEWEST),build/newest.txt)

format: $(READY)  ## put the code into its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## the benchmarks, one after the other, but for the fault campaign, which takes hours
	@for file in $(filter-out benchmarks/faults.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

# Not --quiet: --strict would take no notice of the warnings.
site: $(READY)  ## the documentation as a site that needs no network, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## remove caches and what was built; results and environments stay
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove the environments too
	rm -rf $(VENV) $(OTHER) $(FLOORS) $(NEWEST)

# uv reads the registry's own metadata, so it takes the CUDA build of torch that the constraints mean.
# Byte-code is compiled once here: where writing it later is switched off, every import would take 2-3 times as long.
INSTALL = $(UV) pip install --quiet --python $(BIN)/python --compile-bytecode --constraints tools/constraints.txt
$(READY): pyproject.toml tools/constraints.txt | $(UV)
	@echo "Installing Dyno, its engines and what its tests need into $(VENV): about 7 GB, one to five minutes."
	$(INSTALL) -e '.[all,dev]'
	@touch $@

$(ENGINES_READY): pyproject.toml tools/constraints.txt | $(UV)
	@echo "Installing Dyno with PyTorch, ONNX Runtime and OpenVINO into $(VENV): about 6 GB, one to five minutes."
	$(INSTALL) -e '.[all]'
	@touch $@

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Dyno needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1): make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' can't make virtual environments: install its venv package (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

# A second interpreter, for the test that a worker runs in a foreign Python. None found: that test is skipped and says so.
$(OTHER_READY): | $(READY)
	@main=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	for version in 3.10 3.12 3.13 3.11; do \
	  [ $$version = $$main ] && continue; \
	  for python in "$$(command -v python$$version)" "$$($(UV) python find $$version 2>/dev/null)" \
	      "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$version.*/bin/python; do \
	    [ -n "$$python" ] && "$$python" -c 'import ssl, ctypes' 2>/dev/null || continue; \
	    $(UV) venv --quiet --clear --python "$$python" $(OTHER) \
	      && $(UV) pip install --quiet --compile-bytecode --python $(OTHER)/bin/python numpy 'onnxruntime<1.31' \
	      && touch $@ && echo "$(OTHER): Python $$version, from $$python" && exit 0; \
	  done; \
	done; \
	rm -rf $(OTHER); echo "no CPython besides $$main found (3.10, 3.12 or 3.13): the test of a foreign Python will be skipped"
