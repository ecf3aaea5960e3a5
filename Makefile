# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-all check bench fuzz clean

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[torch,test,lint]'
	touch $@

demo: $(STAMP)        ## jobs come up by every quick route; two ranks train like one
	$(BIN)/python examples/demo.py

check: $(STAMP)       ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check           ## lint, types and all tests but the slow ones
	$(BIN)/pytest -m 'not slow'

test-all: check       ## the slow ones as well: the whole matrix of launches
	$(BIN)/pytest

bench: $(STAMP)       ## a table against torch's own libuv server
	$(BIN)/python benchmarks/against_torch.py

fuzz: $(STAMP)        ## 100,000 random and mutated streams against a live server
	$(BIN)/python tests/fuzz.py --streams 100000

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
