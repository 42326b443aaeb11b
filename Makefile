# Everything a contributor runs. Each target makes .venv by itself; when nothing changed that takes no time.
PYTHON ?= python3
PYTEST_ARGS ?=
# ON makes compiler warnings errors; a newcomer's unknown compiler may warn, and `make demo` must still run.
WERROR ?= OFF

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
NATIVE_SOURCES := CMakeLists.txt $(wildcard native/*)
COMPILED := $(VENV)/lib/python3*/site-packages/ostinato/_native*
PYTEST := $(BIN)/python -m pytest -p xdist -n 2 --dist loadgroup

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch comes first and pinned: left to the resolver, a range may bring gigabytes of CUDA packages.
$(VENV)/.tools: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt scikit-build-core nanobind cmake ninja
	@touch $@

# An editable install remembers where modules are: it has to be renewed when one has moved, or a package is new.
$(VENV)/.layout: FORCE
	@export LC_ALL=C; mkdir -p $(VENV); find src -name '*.py' | sort > $@.new; \
	if [ ! -f $@ ] || comm -23 $@ $@.new | grep -q . || comm -13 $@ $@.new | grep -q __init__; \
	then mv $@.new $@; else rm $@.new; fi
.PHONY: FORCE
FORCE:

# Without isolation the build uses the tools above: it never fetches torch (nor needs it).
$(VENV)/.installed: $(VENV)/.tools $(VENV)/.layout pyproject.toml $(NATIVE_SOURCES)
	$(PIP) install -c constraints.txt --no-build-isolation -Ccmake.define.OSTINATO_WERROR=$(WERROR) -e '.[dev,parity,ray]'
	@ls $(COMPILED) >/dev/null 2>&1 \
		|| echo 'make: ostinato has NO compiled part (no working C++20 compiler?); all runs through torch, slower.'
	@touch $@

.PHONY: venv
venv: $(VENV)/.installed ## Set up .venv and build the compiled part

.PHONY: demo
demo: $(VENV)/.installed ## The main job: train a small agent through the buffer
	$(BIN)/ostinato demo --overwrite

# Both ways, whatever the first one says, and then what starts a Ray cluster, which wants both cores for itself. The status
# is that of the first run that failed.
.PHONY: test
test: $(VENV)/.installed ## The tests, with the compiled part and without it (PYTEST_ARGS=...)
	@status=0; ways='1 0'; \
	ls $(COMPILED) >/dev/null 2>&1 || { ways=0; echo 'no compiled part here: testing the way through torch only'; }; \
	for native in $$ways; do \
		echo "== tests with OSTINATO_NATIVE=$$native"; \
		OSTINATO_NATIVE=$$native $(PYTEST) -m "not slow and not ray" $(PYTEST_ARGS) \
			|| { code=$$?; [ $$status -ne 0 ] || status=$$code; }; \
	done; \
	echo "== tests in a Ray cluster"; \
	$(BIN)/python -m pytest -m "ray and not slow" $(or $(PYTEST_ARGS),tests/distributed tests/e2e/test_examples.py) \
		|| { code=$$?; [ $$code -eq 5 ] || [ $$status -ne 0 ] || status=$$code; }; \
	exit $$status

.PHONY: test-slow
test-slow: $(VENV)/.installed ## Whole training runs, kills at every step and other tests of minutes (PYTEST_ARGS=...)
	$(PYTEST) --timeout 1800 -m slow $(PYTEST_ARGS)

.PHONY: check
check: $(VENV)/.installed ## Style and types: ruff, mypy, clang-format, the house test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror native/*
	$(BIN)/python -m pytest -q tests/test_house.py

.PHONY: bench
bench: $(VENV)/.installed build/peers/.installed ## Measure against the peers that can be installed (BENCH_ARGS=...)
	OSTINATO_BENCH_PEERS_PYTHON=build/peers/bin/python $(BIN)/python -m benchmarks $(BENCH_ARGS)

# Peers have an environment of their own. One that cannot be installed here does not stop the others.
build/peers/.installed: benchmarks/requirements.txt
	test -x build/peers/bin/python || $(PYTHON) -m venv build/peers
	@grep -Ev '^[[:space:]]*(#|$$)' $< | while read -r peer; do \
		build/peers/bin/python -m pip --disable-pip-version-check -q install -c $< "$$peer" \
			|| echo "make: $$peer cannot be installed here, going on without it"; \
	done
	@touch $@

.PHONY: pictures
pictures: $(VENV)/.installed ## Draw the pictures of docs anew
	$(BIN)/python docs/pictures/windows.py

.PHONY: screenshots
screenshots: $(VENV)/.installed ## Take the pictures of docs/viewing.md anew (needs chromium)
	$(BIN)/python docs/screenshots/take.py

.PHONY: docs
docs: $(VENV)/.installed ## Regenerate generated pages and run every code block of README and docs
	@if [ -f docs/build.py ]; then $(BIN)/python docs/build.py; fi
	$(BIN)/python -m pytest tests/test_docs.py $(PYTEST_ARGS)

SANITIZER_LIBS = $(foreach lib,libasan.so libubsan.so libstdc++.so,$(shell $(CXX) -print-file-name=$(lib)))

# The libraries are preloaded because python itself is not instrumented; its own leaks are not ours.
.PHONY: native-sanitize
native-sanitize: $(VENV)/.installed ## The native tests under AddressSanitizer and UBSan
	$(BIN)/cmake -S . -B build-san -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DCMAKE_BUILD_TYPE=Debug \
		-DPython_EXECUTABLE=$(abspath $(BIN))/python -DOSTINATO_SANITIZE=address,undefined -DOSTINATO_WERROR=ON
	$(BIN)/cmake --build build-san
	LD_PRELOAD='$(SANITIZER_LIBS)' ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
		OSTINATO_TEST_NATIVE="$$(ls build-san/_native*.so)" \
		$(BIN)/python -m pytest --confcutdir=tests/native tests/native $(PYTEST_ARGS)

.PHONY: wheel
wheel: $(VENV)/.installed ## Build the source distribution and a wheel into dist/
	$(BIN)/python -m build --no-isolation

.PHONY: clean
clean: ## Remove builds (not .venv)
	rm -rf build build-san dist
