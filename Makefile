# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv from the pinned requirements first.
PYTHON ?= python3
REQUIREMENTS ?= $(if $(wildcard /dev/nvidia0),requirements/gpu.txt,requirements/cpu.txt)
BIN := .venv/bin
# Like the demo, these tests are made for a CPU, also on a machine with a GPU. Those for one: pytest -m gpu tests/gpu
CPU := CUDA_VISIBLE_DEVICES=

.PHONY: demo test test-all lint install requirements

demo: install
	$(BIN)/moebius-rollout demo

test: install
	$(CPU) $(BIN)/pytest

test-all: install
	$(CPU) $(BIN)/pytest -m "not gpu and not multigpu"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: .venv/.installed

# Compiled once, in a minute: where PYTHONDONTWRITEBYTECODE is set, as in many containers, every process of every engine
# else compiles torch, transformers and sglang anew, 15 s each.
.venv/.installed: $(REQUIREMENTS) pyproject.toml
	command -v uv >/dev/null || $(PYTHON) -m pip install --quiet uv
	uv venv --quiet --allow-existing --python $(PYTHON) .venv
	uv pip sync --quiet --compile-bytecode --python $(BIN)/python $(REQUIREMENTS)
	uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

requirements:
	requirements/compile.sh
