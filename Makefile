# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SEEDS  ?= 20000

.PHONY: demo tools test test-all check bench fuzz simulate clean

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[torch,test,lint]'
	touch $@

demo: $(STAMP)        ## jobs come up by every quick route; two ranks train like one
	$(BIN)/python examples/demo.py

tools:                # what a test uses besides: ip and ss, where they are missing and can be installed
	@command -v ss > /dev/null || \
	  { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && \
	    apt-get update -qq && apt-get install -y -qq iproute2; } || true

check: $(STAMP)       ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check tools     ## lint, types and all tests but the slow ones
	$(BIN)/pytest -m 'not slow'

test-all: check tools ## the slow ones as well: the whole matrix of launches
	$(BIN)/pytest

bench: $(STAMP)       ## tables: against torch's own libuv server, and what relays save
	$(BIN)/python benchmarks/against_torch.py
	$(BIN)/python benchmarks/relays.py

fuzz: $(STAMP)        ## 100,000 random and mutated streams against a live server
	$(BIN)/python tests/fuzz.py --streams 100000

simulate: $(STAMP)    ## relays on a failing network, with that many seeds
	$(BIN)/python tests/simulation.py --seeds $(SEEDS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
