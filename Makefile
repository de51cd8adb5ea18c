# Everything this project does, by one command each; `make` alone lists them.
# Works from a fresh checkout: each command first does the set-up it needs, and only what has changed since the last time.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/stamps
CORE   := $(wildcard pagemgr/*.[ch] structures/*.[ch] checkpoint/*.[ch] statestore/*.[ch])
C_TEXT := $(filter-out %.cdef.h,$(CORE)) $(wildcard jvm_bridge/*.[ch] tests/c/*.[ch])

.DEFAULT_GOAL := help
.PHONY: help setup demo test conformance faults lint bench clean

help:
	@echo "make setup   make the virtual environment $(VENV)/ with Quire and all tools in it"
	@echo "make demo    run a streaming query on local Spark with Quire as its state store, kill it, and lose nothing"
	@echo "make test    run all tests, a part of Spark's own among them, then again under sanitizers"
	@echo "make conformance  run all of Spark's own streaming tests on Quire's provider (takes an hour)"
	@echo "make faults  kill writers at every step, damage and fuzz files of checkpoints, all cases there are (takes two hours)"
	@echo "make lint    check format, style and types of the Python and C code"
	@echo "make bench   run the benchmarks: the quick ones, at most 15 minutes on two cores"
	@echo "make clean   remove everything that was built (downloads stay in pip's and Maven's caches)"

$(STAMPS)/venv: tools/check_machine.sh
	@echo "== Checking this machine"
	@sh tools/check_machine.sh $(PYTHON)
	@echo "== Making the virtual environment $(VENV)/"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77" "cffi>=1.17"
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/quire: $(STAMPS)/venv pyproject.toml setup.py src/quire/_native_build.py $(CORE)
	@echo "== Compiling the core and installing Quire into $(VENV)/ (editable)"
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[test]'
	@touch $@

$(STAMPS)/tools: $(STAMPS)/quire pyproject.toml
	@echo "== Installing the tools for lint and bench"
	@$(BIN)/python tools/extras.py lint bench | xargs -d '\n' $(BIN)/python -m pip install --quiet
	@touch $@

setup: $(STAMPS)/quire $(STAMPS)/tools
	@echo "Ready: $$($(BIN)/python -c 'import quire; print("Quire", quire.__version__)') in $(VENV)/; start with $(BIN)/quire demo"

demo: $(STAMPS)/quire
	@$(BIN)/quire demo

test: $(STAMPS)/quire
	@$(BIN)/python tools/run_tests.py

conformance: $(STAMPS)/quire
	@$(BIN)/python tests/conformance/run.py

faults: $(STAMPS)/quire
	@$(BIN)/python tools/run_faults.py $(PARTS)

lint: $(STAMPS)/tools
	@echo "== Python: style"
	@$(BIN)/ruff check .
	@echo "== Python: format"
	@$(BIN)/ruff format --check .
	@echo "== Python: types, of the package laid out as it is installed"
	@rm -rf build/lint && $(BIN)/python setup.py --quiet build_py --build-lib build/lint
	@cd build/lint && ../../$(BIN)/mypy --config-file ../../pyproject.toml --package quire
	@echo "== C: format"
	@$(BIN)/clang-format --dry-run -Werror $(C_TEXT)
	@echo "Lint: all clean"

bench: $(STAMPS)/tools
	@mkdir -p build; rm -f build/bench.json; $(BIN)/quire bench run --quick --json build/bench.json >build/bench.txt; code=$$?; \
	  $(BIN)/quire bench report build/bench.json --html build/bench.html --markdown build/bench.md && \
	  echo "Report: build/bench.html, or build/bench.md with plots in build/bench/; numbers: build/bench.json"; exit $$code

clean:
	@rm -rf $(VENV) build dist *.egg-info src/*.egg-info src/quire/*.so .pytest_cache .hypothesis .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "Clean"
