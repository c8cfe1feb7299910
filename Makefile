# Everything a fresh machine needs, with Python 3.10 or newer as the only thing present:
#
#   make demo     train a small real network live and recorded, and compare
#   make test     the tests
#
# Both make their own virtual environment in .venv from constraints.txt; the second run finds it ready.
# With an NVIDIA GPU in the machine they use it.
#
#   make lint     ruff, mypy, towncrier    make changelog    what is new since the last release
#   make wheel    dist/*.whl               make docs         the documentation, as pages in site/
#   make clean    forget all of it         make soak      faults, and drawn programs: SEED=1 SECONDS=600
#
#   PYTHON=python3.12      another interpreter to start from
#   PYTHON_ENV=system      no virtual environment: the packages that PYTHON already has, and ./src
#   TORCH=2.11.0           another release of torch than constraints.txt's, in an environment of its own (.venv-2.11.0)
#   WORKERS=4              processes that share the tests (2)
#   SLOW=1                 with the tests that are marked slow
#   ARGS="--json"          more arguments for the command (demo, test)
#   PIP_ARGS="..."         more arguments for pip install (a mirror, --no-index, --find-links)

PYTHON     ?= python3
PYTHON_ENV ?= venv
TORCH      ?=
VENV       ?= .venv$(if $(TORCH),-$(TORCH))
WORKERS    ?= 2
SLOW       ?=
SEED       ?= 0
SECONDS    ?= 600
ARGS       ?=
PIP_ARGS   ?=

ifeq ($(PYTHON_ENV),system)
  READY = check-python
  RUN  := PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
  # Run from ./src, nothing tells pytest of our plugin; where phonograph is installed, naming it twice is an error.
  OPTIONS := $(shell $(PYTHON) -c 'from importlib.metadata import entry_points as e; \
    print("" if any(p.name == "phonograph" for p in e(group="pytest11")) else "-p phonograph.pytest_plugin")' 2>/dev/null)
else
  READY = $(addprefix $(VENV)/.ready-,$(1))
  RUN  := $(VENV)/bin/python
  # Each file of tests in one process: what one test leaves compiled or cached is there for the next, as in a user's program.
  OPTIONS = --numprocesses=$(WORKERS) --dist=loadfile
endif

# Another release of torch asks for other releases of what goes with it: it says so itself, exactly.
PINS = $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)

# Else each process that a test starts compiles all of src, and each worker all tests, in each run.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test soak lint changelog docs wheel clean check-python
.NOTPARALLEL:

demo: $(call READY,demo)
	$(RUN) -m phonograph demo $(ARGS)

test: $(call READY,test loops pipelines)
	$(RUN) -m pytest $(OPTIONS) $(if $(SLOW),,-m "not slow") $(ARGS)

soak: $(call READY,test)
	$(RUN) -m tests.faults.run --seconds $(SECONDS) --seed $(SEED)
	$(RUN) -m tests.simulation.run --seconds $(SECONDS) --seed $(SEED) --jobs 2 $(ARGS)

lint: $(call READY,test dev)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m towncrier build --draft --version next >/dev/null

changelog: $(call READY,dev)
	@$(RUN) -m towncrier build --draft --version $(if $(VERSION),$(VERSION),next) 2>/dev/null

docs: $(call READY,docs)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

wheel: $(call READY,dev)
	rm -rf dist
	$(RUN) -m build --wheel --outdir dist

clean:
	rm -rf $(VENV) .venv-* build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis benchmarks/out
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "phonograph needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing)." >&2; \
	  echo "Name another one:  make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }

$(VENV)/.made:
	@$(MAKE) --no-print-directory check-python MAKECMDGOALS="$(MAKECMDGOALS)"
	@echo "making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)." >&2; \
	  echo "If it has torch already:  make $(MAKECMDGOALS) PYTHON_ENV=system" >&2; exit 1; }
	@touch $@

$(VENV)/.ready-pipelines: pipelines.txt | $(VENV)/.made
	@$(VENV)/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps -r pipelines.txt || \
	  echo "lightning-thunder and torchtitan could not be installed: their tests are skipped." >&2
	@touch $@

$(VENV)/constraints.txt: constraints.txt Makefile | $(VENV)/.made
	@sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^# What goes with that release/,/^$$/d' constraints.txt > $@

$(VENV)/.ready-%: pyproject.toml $(PINS) | $(VENV)/.made
	@echo "installing what '$*' needs, torch among it (once; it may take some minutes) ..."
	@$(VENV)/bin/python -m pip install --quiet $(PIP_ARGS) -c $(PINS) -e ".[$*]" || { \
	  echo "The packages could not be installed. Without a network, and with torch in $(PYTHON) already:" >&2; \
	  echo "  make $(MAKECMDGOALS) PYTHON_ENV=system" >&2; exit 1; }
	@touch $@
