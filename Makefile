# Every target makes its own .venv from pinned constraints; nothing else has to be installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TRANSPORTS := $(VENV)/.transports
# vLLM needs libraries in versions of its own: 3.7 GB, kept between runs and clones in the user's cache, or in VLLM_VENV.
# All tests are for vLLM 0.32; VLLM_VERSION=0.31.0 runs the smoke test. ARGS goes to pytest: make test-vllm ARGS="-k abort"
VLLM_SMOKE := tests/vllm/integration/test_smoke.py
BY_FILE := --dist loadfile --no-loadscope-reorder
VLLM_TESTS ?= $(if $(filter-out 0.32.%,$(VLLM_VERSION)),$(VLLM_SMOKE),tests/vllm --ignore $(VLLM_SMOKE))

.PHONY: demo test test-vllm test-sglang conformance lint docs bench parity topologies simulate train wheel install-check clean

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing baton-serve and its pinned dependencies into $(VENV) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# The libraries of two transports, 115 MB. Where there is no wheel, the tests of that transport skip and say why.
$(TRANSPORTS): $(STAMP)
	@ok=1; for package in nixl-cu12 mooncake-transfer-engine-non-cuda; do \
		$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $$package || ok=0; \
	done; if [ $$ok = 1 ]; then touch $@; else echo "not all transports can be installed here; going on without"; fi

demo: $(STAMP)
	@$(BIN)/python -m benchmarks.demo

# For two cores: one worker of three mostly waits for processes that its tests start. Kernels of unchanged sources are
# kept for the next run and clone in the user's cache, or in NUMBA_CACHE_DIR: to compile them takes 3 minutes of CPU.
test: $(TRANSPORTS)
	@kept="$${NUMBA_CACHE_DIR:-$${XDG_CACHE_HOME:-$$HOME/.cache}/baton/kernels}" && \
		env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 NUMBA_CACHE_DIR="$$kept" $(BIN)/python -m pytest -n 3 $(BY_FILE)

conformance: $(TRANSPORTS)
	@$(BIN)/python -m baton.testing.conformance

test-vllm:
	@OMP_NUM_THREADS=1 PYTHONPATH=src $(PYTHON) tools/install_vllm.py $(if $(VLLM_VERSION),--version $(VLLM_VERSION)) \
		$(if $(VLLM_VENV),--directory $(VLLM_VENV)) python -m pytest -n 2 $(BY_FILE) $(VLLM_TESTS) $(ARGS)

# SGLang needs an environment of its own too, 7 GB. A machine that cannot have it skips, and says why.
test-sglang:
	@OMP_NUM_THREADS=1 PYTHONPATH=src $(PYTHON) tools/install_sglang.py --or-skip $(if $(KEPT),--if-kept) \
		$(if $(SGLANG_VENV),--directory $(SGLANG_VENV)) python -m pytest $(or $(SGLANG_TESTS),tests/sglang) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check src simulation benchmarks testkit tests tools examples
	$(BIN)/ruff format --check src simulation benchmarks testkit tests tools examples
	$(BIN)/mypy
	$(BIN)/python -m tools.prose.words --most 65820

# The documentation site, in build/site. Broken links are errors. $(VENV)/.docs says that mkdocs is installed.
docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m tools.site

$(VENV)/.docs: $(STAMP)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

bench: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.all

parity: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.parity

topologies: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.topologies

simulate: $(STAMP)
	@$(BIN)/python -m simulation --seeds 20000

train: $(STAMP)
	$(BIN)/python -m tools.train_demo_models
	$(BIN)/python -m tools.train_demo_deepseek
	$(BIN)/python -m tools.demo_training.train_hybrid
	$(BIN)/python -m tools.demo_training.train_dflash

# dist/baton_serve-*.whl: installs without a clone.
wheel: $(STAMP)
	@$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps -w dist .

# Whether constraints.txt has a solution on each Python; ARGS="--install 3.10 3.13" installs, and runs a slice of the tests.
install-check: $(STAMP)
	@$(BIN)/python -m tools.check_install $(ARGS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info
