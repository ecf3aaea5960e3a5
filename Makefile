# Two commands do everything on a fresh machine: `make demo` and `make test`. `make help` lists the others.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
COMPILED := build/compiled/.built
SEEDS  ?= 20000
SECONDS ?= 600
STREAMS ?= 10000000

# Four tests at a time keep two cores busy, since many wait for processes. A worker that is done takes over half of
# what another one has left.
SIDE_BY_SIDE := -n 4 --dist worksteal

# The tests start hundreds of interpreters. With their byte code on disk, each starts in half the time.
unexport PYTHONDONTWRITEBYTECODE

# The tools are installed while pip installs.
MAKEFLAGS += --jobs=2

.PHONY: help demo tools test test-pure test-all test-windows test-pythons check docs bench bench-full explain-score fuzz simulate chaos clean
.DEFAULT_GOAL := help

help:                 ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): EXTRAS := torch,bench,test,lint
$(VENV)/.docs: EXTRAS := docs
$(STAMP) $(VENV)/.docs: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	RALLYPOINT_PURE=1 $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $@

demo: $(STAMP)        ## jobs come up by every quick route; two ranks train like one
	$(BIN)/python examples/demo.py

tools:                # what else is used: ss, engines, a C compiler and a browser, where they can be installed
	@{ command -v ss && command -v redis-server && command -v redis-sentinel && command -v etcd && \
	   command -v cc && command -v chromium; } > /dev/null || \
	  { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get update -qq && \
	    RUNLEVEL=1 apt-get install -y -qq iproute2 redis-server redis-sentinel etcd-server gcc libc6-dev chromium; \
	  } > /dev/null 2>&1 || true

check: $(STAMP)       ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff check --quiet --preview --select PLW1514 src  # a file without an encoding has that of the machine
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The wheel is compiled beside the tests, and only if something has changed.
$(COMPILED): $(shell find src -name '*.py' -o -name '*.pyx') hatch_build.py pyproject.toml | $(STAMP) tools
	$(BIN)/python tests/tools/compiled.py build
	touch $@

test-pure: check tools
	$(BIN)/pytest $(SIDE_BY_SIDE) -m 'not slow'

test: test-pure $(COMPILED) ## lint, types and all tests but the slow ones; those of the core compiled as well
	$(BIN)/python tests/tools/compiled.py test $(SIDE_BY_SIDE)

test-all: check tools $(COMPILED) ## all tests: the whole matrix of launches as well; then compiled, on Windows and with other Pythons
	$(BIN)/pytest $(SIDE_BY_SIDE)
	$(BIN)/python tests/tools/compiled.py test --simulations $(SIDE_BY_SIDE)
	$(BIN)/python tests/on_windows.py test --may-skip
	$(BIN)/python tests/tools/pythons.py

test-windows: $(STAMP) ## tests in a Python for Windows under Wine, with torch's own wheel; as root, on Debian
	$(BIN)/python tests/on_windows.py test

test-pythons: $(STAMP) ## the part without torch with each Python from 3.10 to 3.14 that can be had here
	$(BIN)/python tests/tools/pythons.py

# Not --quiet: warnings would not count then.
docs: $(VENV)/.docs   ## the pages of docs/ as a site in build/site; a dead link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP) tools ## all measurements, quickly, against torch's own servers and redis
	$(BIN)/python -m benchmarks all --quick

bench-full: $(STAMP) tools ## all measurements in full, to 98,304 ranks, and the page with its figures
	$(BIN)/python -m benchmarks all --json docs/benchmarks.json
	$(BIN)/python -m benchmarks page docs/benchmarks.json --output docs/benchmarks.md

explain-score: $(STAMP) ## how well explain does on the logs of tests/explain/corpus that nobody works with
	$(BIN)/python tests/tools/explain_score.py

fuzz: $(STAMP)        ## 10,000,000 hostile streams, or STREAMS=..., on all cores; goes on where it was stopped
	$(BIN)/python tests/tools/fuzz.py --streams $(STREAMS)

simulate: $(STAMP)    ## relays on a failing network, with 20,000 seeds, or SEEDS=...
	$(BIN)/python tests/tools/simulation.py --seeds $(SEEDS)

chaos: $(STAMP) tools ## real jobs under faults, for 10 minutes, or SECONDS=... SEED=...; as root, on Linux
	$(BIN)/python tests/tools/chaos.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

clean:                ## remove the virtual environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
