# Everything runs from .venv, which is made on first use and brought up to date when pyproject.toml or
# constraints.txt changes. Options for the tool behind a target go in ARGS: make test ARGS="-k fusion -x"
# TORCH names another PyTorch than that of constraints.txt, which gets an environment of its own: make test TORCH=2.15.0

PYTHON ?= python3
NPROC = 2
ARGS =
PINNED_TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH = $(PINNED_TORCH)

OTHER_TORCH := $(filter-out $(PINNED_TORCH),$(TORCH))
VENV := .venv$(if $(OTHER_TORCH),-torch-$(TORCH))
CONSTRAINTS := $(VENV)/constraints.txt
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs bench clean

help: ## show this list
	@echo 'usage: make TARGET [ARGS="..."] [PYTHON=python3] [TORCH=$(PINNED_TORCH)]'
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-8s %s\n", $$1, $$2 }'

demo: $(STAMP) ## train the digits example on NPROC (2) processes and show the compiled graph
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node $(NPROC) examples/train_digits.py --dump-graph $(ARGS)

# Tests start tens of processes, each of which would compile the package anew.
test: $(STAMP) ## run the tests
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n 3 --dist worksteal $(ARGS)

lint: $(STAMP) ## ruff check, ruff format --check, mypy
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy -p commfuse_fx

docs: $(DOCS_STAMP) ## build the site of README, docs/ and the API reference into site/; check its links
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict $(ARGS)
	@echo 'site/index.html'

bench: $(STAMP) ## run the benchmarks
	$(PY) -m benchmarks $(ARGS)

clean: ## remove builds, caches and output; .venv and .venv-torch-* stay
	rm -rf build dist site out dumps htmlcov *.egg-info .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -path ./.git -prune -o -type d -name __pycache__ -exec rm -rf {} +

# An environment that is already there is reused. torch goes first and alone, so that the build pip is
# configured to find (a local CPU wheel, say) is settled before anything that depends on it is resolved.
# PyTorch 2.11 and 2.12 need a setuptools below 82, so another PyTorch chooses its own.
$(STAMP): pyproject.toml constraints.txt
	@if [ ! -e $(VENV)/bin/python ] && [ ! -L $(VENV)/bin/python ]; then \
	  command -v "$(PYTHON)" >/dev/null || \
	    { echo 'error: no $(PYTHON); install Python 3.10 or later, or name one: make PYTHON=/path/to/python3' >&2; exit 1; }; \
	  "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "error: $(PYTHON) is $$("$(PYTHON)" -V 2>&1); Python 3.10 or later is needed: make PYTHON=/path/to/python3" >&2; exit 1; }; \
	  "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo 'error: $(PYTHON) lacks venv or ensurepip; on Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }; \
	  echo '$(PYTHON) -m venv $(VENV)'; "$(PYTHON)" -m venv $(VENV); \
	fi
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'error: $(VENV) does not hold a working Python 3.10 or later; remove it and run make again' >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip
	@sed 's/^torch==.*/torch==$(TORCH)/$(if $(OTHER_TORCH),; /^setuptools==/d)' constraints.txt > $(CONSTRAINTS)
	$(PY) -m pip install -c $(CONSTRAINTS) torch==$(TORCH)
	$(PY) -m pip install -c $(CONSTRAINTS) -e '.[dev,examples,cli]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(PY) -m pip install -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@
