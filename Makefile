# All targets work on a fresh clone: what they need is installed into .venv first. `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Apart from the rest: the auditor's own dependencies are not the project's.
AUDIT := $(VENV)/audit
NEWEST := $(VENV)/newest
# Tests of one file share what they started, so a file stays on one core. ARGS="-n 0" runs all in one process, for a debugger.
ON_ALL_CORES := -n auto --dist loadfile
# Arguments for the command behind serve, test, bench and loadtest: make test ARGS="-k sampler -x"
ARGS ?=

PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
TRITON_STAMP := $(VENV)/.installed-triton

# Tests start hundreds of Python processes, which compile all of torch's modules each where no bytecode is kept.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install serve check audit format test test-slow test-newest coverage bench loadtest wheel docker clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(DEV_STAMP) ## install twostep and the development tools into .venv

serve: $(RUN_STAMP) ## serve the embedded model on http://127.0.0.1:8000
	@exec $(BIN)/twostep serve $(ARGS)

check: $(DEV_STAMP) ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict

audit: $(BIN)/python ## look for known vulnerabilities in the pinned dependencies; needs the network
	@test -x $(AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT) && \
		$(AUDIT)/bin/python -m pip --disable-pip-version-check install --quiet 'pip-audit>=2.9,<3'; }
	$(AUDIT)/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --progress-spinner off

format: $(DEV_STAMP) ## format the code and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(DEV_STAMP) ## run the tests that take minutes: every law, on this machine's own instruction set
	$(BIN)/python -m pytest $(ON_ALL_CORES) -m "not slow" $(ARGS)

test-slow: $(TRITON_STAMP) ## run what is slow and broad: other instruction sets, sanitizers, whole programs
	TWOSTEP_FUZZ=$${TWOSTEP_FUZZ:-5} $(BIN)/python -m pytest $(ON_ALL_CORES) -m "slow or fuzz" $(ARGS)

test-newest: $(BIN)/python ## run the fast tests with the newest versions that pip finds, but for torch
	$(PYTHON) -m venv $(NEWEST)
	grep '^torch==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip --disable-pip-version-check install --quiet --upgrade \
		--constraint $(NEWEST)/constraints.txt torch --editable '.[dev]'
	$(NEWEST)/bin/python -m pytest $(ON_ALL_CORES) -m "not slow" $(ARGS)

coverage: $(DEV_STAMP) ## run all tests, slow ones too, with coverage of engine/, which has a floor
	$(BIN)/python -m pytest --cov --cov-report=term-missing $(ARGS)

bench: $(RUN_STAMP) ## run the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

loadtest: $(RUN_STAMP) ## put load on a server, by default on http://127.0.0.1:8000
	$(BIN)/python -m loadtest $(ARGS)

wheel: $(RUN_STAMP) ## build a wheel with the CPU kernels compiled for every kind of CPU, into dist
	$(BIN)/python -m tools.wheel $(ARGS)

docker: ## build the container image
	docker build --tag twostep $(ARGS) .

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or later: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone, so that its build is chosen by the constraint and by nothing that depends on it. Without an
# NVIDIA driver that is the build for the CPU, where PyTorch's index answers and no other is chosen in pip's environment.
$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV): a minute or two, once"
	$(PIP) $$($(BIN)/python -m tools.torch_index) torch
	$(PIP) --editable .
	@touch $@

$(DEV_STAMP): $(RUN_STAMP)
	$(PIP) --editable '.[dev]'
	@touch $@

$(TRITON_STAMP): $(DEV_STAMP)
	$(PIP) --editable '.[triton]'
	@touch $@
