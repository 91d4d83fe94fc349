VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3

.PHONY: demo test test-fast gpu bench lint clean

# Everything below installs by package name into $(VENV), once.
$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,eval]'
	touch $@

demo: $(VENV)/.base
	$(BIN)/lazystate compare

test: $(VENV)/.dev
	$(BIN)/pytest -n 2 -m 'not gpu'

test-fast: $(VENV)/.dev
	$(BIN)/pytest -n 2 -m 'not gpu and not slow'

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# On a machine with a CUDA device and torch already installed; writes benchmarks/results/. Published
# kernels are measured, too, where benchmarks/fetch_peers.py has put them.
gpu:
	PYTHONPATH=src:data/peers $(PYTHON) -m pytest -m gpu
	$(MAKE) bench

bench:
	PYTHONPATH=src:data/peers $(PYTHON) benchmarks/run.py --warm 8

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
