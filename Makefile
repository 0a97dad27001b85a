# Every target starts from a bare python3 (3.11 to 3.13): the first one builds .venv from requirements.lock.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PYTHONUNBUFFERED := 1

VENV := .venv
RUN := $(VENV)/bin/python
PYTEST := $(RUN) -m pytest -q --durations=12 --durations-min=1
# pip speaks several lines per package; shown is every tenth package, and the end of the log when it fails.
PIP_INSTALL = pip_install() { \
	  local log=$(VENV)/install.log; \
	  $(RUN) -m pip install --no-compile "$$@" 2>&1 | tee "$$log" \
	    | awk '$$1 == "Collecting" && ++n % 10 == 1 { print "  " n ": " $$2; fflush() } \
	           /^(Building wheels|Installing collected)/ { sub(/:.*/, ""); print "  " $$0; fflush() }' \
	    || { tail -n 25 "$$log"; echo "Installing failed; the whole output is in $$log"; return 1; }; \
	}; pip_install

.PHONY: help quickstart test test-slow test-long lint format check bench lock clean

help:  ## Lists the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{ printf "  make %-11s %s\n", $$1, $$2 }'

quickstart: $(VENV)/.installed  ## Trains four jobs at once on SmolLM2-135M, on the CPU
	@$(VENV)/bin/marlaas run examples/quickstart.yaml

test: $(VENV)/.installed  ## The fast tests
	@$(PYTEST) -n 2 --dist loadfile

test-slow: $(VENV)/.installed-test  ## The slow tests: live references (torch, transformers, peft), crashes, learning, notebooks
	@$(PYTEST) -m slow -n 2 --dist loadfile --timeout 1200 -o faulthandler_timeout=1190

test-long: $(VENV)/.installed  ## What takes many minutes and CI leaves out: killed and frozen services, a scripted day, two hundred crowds
	@$(PYTEST) -m long --timeout 3600 -o faulthandler_timeout=3590

lint: $(VENV)/.installed-lint  ## ruff, pyright and the import layers
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/lint-imports --no-logo
	@$(VENV)/bin/pyright

format: $(VENV)/.installed-lint  ## Formats the code and sorts imports
	@$(VENV)/bin/ruff check --fix-only --quiet . ; $(VENV)/bin/ruff format .

check: lint test  ## lint and test: what a change must pass

bench: $(VENV)/.installed  ## The benchmarks: engine, learner, run, service
	@$(VENV)/bin/marlaas bench engine
	@$(VENV)/bin/marlaas bench learner
	@$(VENV)/bin/marlaas bench run
	@$(VENV)/bin/marlaas bench service

clean:  ## Removes .venv and caches; keeps runs/
	@rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up -----------------------------------------------------------------------------------------------------------

$(VENV)/bin/python:
	@for python in $${PYTHON:+"$$PYTHON"} python3 python3.13 python3.12 python3.11; do \
	  "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || continue; \
	  "$$python" -c 'import ensurepip, venv' 2>/dev/null \
	    || { echo "$$python has no venv module: install the package python3-venv, or set PYTHON to another python."; exit 2; }; \
	  echo "Making $(VENV) with $$("$$python" --version)"; \
	  exec "$$python" -m venv --clear $(VENV); \
	done; \
	echo "marlaas_jax needs Python 3.11, 3.12 or 3.13 and found none ($$(python3 --version 2>&1 || true)); set PYTHON to one."; \
	exit 2

$(VENV)/.installed: requirements.lock pyproject.toml | $(VENV)/bin/python
	@echo "Installing $$(grep -c == requirements.lock) packages from requirements.lock into $(VENV) (about 0.4 GB to download, once)"
	@start=$$SECONDS; $(PIP_INSTALL) --no-deps -r requirements.lock; \
	$(PIP_INSTALL) --no-deps --no-build-isolation --editable .; \
	touch $@; echo "Installed in $$((SECONDS - start)) s"

$(VENV)/.installed-lint: requirements-dev.lock $(VENV)/.installed
	@echo "Installing the linters from requirements-dev.lock"
	@$(PIP_INSTALL) --no-deps -r requirements-dev.lock; touch $@

# With dependencies, unlike the others: what torch needs beside itself differs between its CPU and its CUDA builds.
$(VENV)/.installed-test: requirements-test.lock $(VENV)/.installed
	@echo "Installing torch, transformers and peft from requirements-test.lock"
	@$(PIP_INSTALL) -r requirements-test.lock; touch $@

# torch's CUDA packages stay out of requirements-test.lock, so that a CPU build of torch can serve.
TORCH_CUDA := cuda-bindings cuda-toolkit nvidia-cudnn-cu13 nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvshmem-cu13 triton
COMPILE = $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest --no-emit-index-url \
	--no-header --no-annotate
NEVER = printf "%s; sys_platform == 'never'\n"

lock: $(VENV)/.installed  ## Makes the lock files anew from pyproject.toml; UPGRADE=--upgrade takes the newest versions
	@test -x $(VENV)/bin/uv || $(RUN) -m pip install --quiet uv
	@$(COMPILE) $(UPGRADE) pyproject.toml --extra service --extra envs --extra jetstream --extra test --group lock \
	  --generate-hashes -o requirements.lock
	@$(COMPILE) $(UPGRADE) --group lint -c <(sed -E '/^ +--hash/d; s/ \\$$//' requirements.lock) --generate-hashes \
	  -o requirements-dev.lock
	@$(COMPILE) $(UPGRADE) --group parity -c <(sed -E '/^ +--hash/d; s/ \\$$//' requirements.lock) \
	  --overrides <($(NEVER) $(TORCH_CUDA)) -o requirements-test.lock
	@wc -l requirements*.lock
