# One verb for each thing a developer does; CI runs the same ones.
# VENV is where they run; TORCH_VERSION is the one tested here (a CPU build is enough).
VENV ?= .venv
PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
# Many tests wait for a timeout or a server: two at a time, a file's tests in one process.
PARALLEL ?= -n 2 --dist loadfile
BIN := $(VENV)/bin

.PHONY: help setup demo test sglang sglang-all ceph lint types format bench stress reports clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PLUGINS := plugins/hicache-storage-fsspec plugins/hicache-storage-redis

$(VENV)/.engine: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH_VERSION)
	$(PIP) -e '.[engine]'
	touch $@

$(VENV)/.dev: $(VENV)/.engine $(PLUGINS:%=%/pyproject.toml)
	$(PIP) -e '.[dev]' $(PLUGINS:%=-e './%[test]')
	touch $@

setup: $(VENV)/.dev ## a virtual environment with everything that the other verbs need

demo: $(VENV)/.engine ## the main job: a speculative engine keeps its accept length over a restart
	$(BIN)/python examples/engine/demo.py

test: setup ## all tests that need no GPU; those of Redis need redis-server on the PATH
	$(BIN)/python -m pytest $(PARALLEL)
	set -e; for plugin in $(PLUGINS); do $(BIN)/python -m pytest $$plugin -c $$plugin/pyproject.toml; done

sglang: ## real SGLang, its oldest and newest supported release, on the CPU; makes environments in .sglang
	$(PYTHON) tests/real_sglang/environments.py 0.5.11 0.5.23

sglang-all: ## the releases of SGLang between those two, and a table of the results
	$(PYTHON) tests/real_sglang/environments.py all

ceph: setup ## the conformance kit on s3:// with a real Ceph; needs ceph-mon, ceph-osd and radosgw
	$(BIN)/python -m pytest tests/contract/ceph.py

lint: setup ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## static types
	$(BIN)/mypy

format: setup ## puts the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## the file backend beside memcpy and the disk
	$(BIN)/python benchmarks/file_backend.py

stress: setup ## 4 processes x 4 threads for a minute on file, lmdb, s3 and redis
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python benchmarks/stress_report.py

reports: setup ## docs/conformance-reports.md: the kit on every backend, with real servers, Ceph too
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python benchmarks/conformance_reports.py

clean: ## removes the environment and what tools left
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
