# Everything a contributor runs. Each target makes .venv by itself; when nothing changed that takes no time.
PYTHON ?= python3
PYTEST_ARGS ?=
# ON makes compiler warnings errors; a newcomer's unknown compiler may warn, and `make demo` must still run.
WERROR ?= OFF

# Where the variable is set, as in many containers, each process of the tests would compile the library anew.
unexport PYTHONDONTWRITEBYTECODE

COMMA := ,
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
NATIVE_SOURCES := CMakeLists.txt $(wildcard native/*)
COMPILED := $(VENV)/lib/python3*/site-packages/ostinato/_native*
# Profile of Hypothesis: quick, or thorough, which tries ten times as many examples.
PROFILE ?= quick
# One thread of torch for each worker: two of each would wait for each other on two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p xdist -n 2 --dist loadgroup --hypothesis-profile=$(PROFILE) --durations=20 \
	$(if $(filter thorough,$(PROFILE)),--timeout 1800)
# Where the extension is installed, one that does not load is an error, not a reason to skip tests.
NATIVE = $$(ls $(COMPILED) >/dev/null 2>&1 && echo 1 || echo 0)

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

# One environment in three sizes: what the demo needs, what contributors need, and the libraries that some tests run beside
# Ostinato. Without isolation the build uses the tools above: it never fetches torch (nor needs it).
SOURCES := $(VENV)/.tools $(VENV)/.layout pyproject.toml $(NATIVE_SOURCES)
define install
	$(PIP) install -c constraints.txt --no-build-isolation -Ccmake.define.OSTINATO_WERROR=$(WERROR) -e '.[$(1)]'
	@ls $(COMPILED) >/dev/null 2>&1 \
		|| echo 'make: ostinato has NO native extension (no working C++20 compiler?); all runs through torch, slower.'
	@touch $(2)
endef

$(VENV)/.demo: $(SOURCES)
	$(call install,demo,$@)

$(VENV)/.installed: $(SOURCES)
	$(call install,dev,$@ $(VENV)/.demo)

$(VENV)/.all: $(SOURCES)
	$(call install,dev$(COMMA)parity$(COMMA)ray,$@ $(VENV)/.installed $(VENV)/.demo)
	@$(PIP) install --no-deps rlinf==0.3.0 || echo 'make: rlinf cannot be installed here, going on without it'

# Packages whose replay buffers tests run beside ours: their requirements contradict ours, so they come without them.
build/originals/.installed: $(VENV)/.tools
	@$(PIP) install --no-deps --ignore-requires-python --upgrade --target build/originals \
		skrl==2.1.1 holosoma==0.0.3 lerobot==0.6.1 sb3-contrib tensorboard protobuf absl-py tqdm grpcio "av<16" \
		transferqueue==0.1.11 hydra-core antlr4-python3-runtime==4.9.3 msgspec prometheus_client pyzmq omegaconf \
		|| echo 'make: skrl, holosoma, lerobot or transferqueue cannot be installed here, going on without them'
	@mkdir -p $(@D); touch $@

.PHONY: venv
venv: $(VENV)/.installed ## Set up .venv and build the native extension

.PHONY: demo
demo: $(VENV)/.demo ## The main job: train a small agent through the buffer
	$(BIN)/ostinato demo --overwrite

# Runs `env $(1)`, and keeps the status of the first run that failed in $$status. PYTEST_ARGS may leave a run without tests.
define run
	{ env $(1) || { code=$$?; \
		if [ $$code -eq 5 ] && $(if $(PYTEST_ARGS),true,false); then code=0; fi; \
		[ $$status -ne 0 ] || status=$$code; }; }
endef

.PHONY: test
test: $(VENV)/.installed ## The tests (PYTEST_ARGS=...)
	OSTINATO_NATIVE=$(NATIVE) $(PYTEST) -m "not slow and not ray and not parity and not house" $(PYTEST_ARGS)

# Ray starts a cluster, which needs both cores for itself.
.PHONY: test-peers
test-peers: $(VENV)/.all build/lerobot/.installed build/originals/.installed ## The tests beside TorchRL, LeRobot and Minari, and in a Ray cluster (PYTEST_ARGS=...)
	@status=0; \
	echo "== tests beside TorchRL, LeRobot and Minari"; \
	$(call run,$(PYTEST) -m "parity and not slow" $(or $(PYTEST_ARGS),tests/parity)); \
	echo "== tests in a Ray cluster"; \
	$(call run,$(BIN)/python -m pytest -m "ray and not slow" $(or $(PYTEST_ARGS),tests/distributed tests/e2e)); \
	exit $$status

.PHONY: test-slow
test-slow: $(VENV)/.all ## Tests of the house, training runs, kills at every step and other tests of minutes (PYTEST_ARGS=...)
	$(PYTEST) --timeout 1800 -m "slow or house" $(PYTEST_ARGS)

.PHONY: test-all
test-all: ## All tests, with the thorough profile of Hypothesis: test, test-peers and test-slow, whatever the first ones say
	@status=0; for target in test test-peers test-slow; do $(MAKE) $$target PROFILE=thorough || status=$$?; done; exit $$status

# N faults chosen by SEED; FLOOR=1 tries those that must be noticed.
N ?= 50
SEED ?= 0
.PHONY: mutants
mutants: $(VENV)/.installed ## Put small faults into a copy of the code; report which ones no test notices (N=50 SEED=0 FLOOR=1)
	$(BIN)/python -m tests.mutants $(if $(FLOOR),--floor,--count $(N) --seed $(SEED))

.PHONY: check
check: $(VENV)/.installed ## Style and types: ruff, mypy, clang-format, the house test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(wildcard native/*.cpp native/*.hpp)
	$(BIN)/python -m pytest -q tests/test_house.py

.PHONY: bench
bench: $(VENV)/.all build/peers/.installed build/lerobot/.installed build/originals/.installed ## Measure against the peers that can be installed (BENCH_ARGS=...)
	OSTINATO_BENCH_PEERS_PYTHON=build/peers/bin/python $(BIN)/python -m benchmarks $(BENCH_ARGS)
	@$(if $(BENCH_ARGS),true,$(BIN)/python -m benchmarks.doors) \
		|| echo 'make: the buffers that ostinato.compat replaces are not all in build/originals'

# Peers have an environment of their own. One that cannot be installed here does not stop the others.
build/peers/.installed: benchmarks/requirements.txt
	test -x build/peers/bin/python || $(PYTHON) -m venv build/peers
	@grep -Ev '^[[:space:]]*(#|$$)' $< | while read -r peer; do \
		build/peers/bin/python -m pip --disable-pip-version-check -q install -c $< "$$peer" \
			|| echo "make: $$peer cannot be installed here, going on without it"; \
	done
	@touch $@

# LeRobot's pins contradict ours and each other. Its video reader loads the libraries of ffmpeg, which apt installs.
LEROBOT_PIP := build/lerobot/bin/python -m pip --disable-pip-version-check -q install
build/lerobot/.installed: tests/parity/datasets/requirements.txt
	test -x build/lerobot/bin/python || $(PYTHON) -m venv build/lerobot
	@{ $(LEROBOT_PIP) -r $< && $(LEROBOT_PIP) --no-deps lerobot==0.4.4 torchvision==0.29.2 torchcodec==0.13.0; } \
		|| echo "make: lerobot cannot be installed here, going on without it"
	@touch $@

.PHONY: pictures
pictures: $(VENV)/.installed ## Draw the pictures of docs anew
	for script in docs/pictures/*.py; do $(BIN)/python "$$script" || exit 1; done

.PHONY: screenshots
screenshots: $(VENV)/.installed ## Take the pictures of docs/viewing.md anew (needs chromium)
	$(BIN)/python docs/screenshots/take.py

.PHONY: docs
docs: $(VENV)/.installed ## Run every code block of README and docs
	$(BIN)/python -m pytest tests/test_docs.py $(PYTEST_ARGS)

.PHONY: site
site: $(VENV)/.installed ## Build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --clean

.PHONY: stub
stub: $(VENV)/.installed ## Write the stub of the native extension from its signatures
	$(BIN)/python tests/native/stub.py

# Builds the extension with sanitizers in folder $(1) and runs the native tests with it. The libraries of the sanitizers
# are preloaded, since python itself is not instrumented. What they report goes to the terminal: pytest does not capture it.
libraries = $(foreach lib,$(1) libstdc++.so,$(shell $(CXX) -print-file-name=$(lib)))
define sanitize
	$(BIN)/cmake -S . -B $(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DCMAKE_BUILD_TYPE=Debug \
		-DPython_EXECUTABLE=$(abspath $(BIN))/python -DOSTINATO_SANITIZE=$(2) -DOSTINATO_WERROR=ON
	$(BIN)/cmake --build $(1)
	LD_PRELOAD='$(call libraries,$(3))' OSTINATO_TEST_NATIVE="$$(ls $(1)/_native*.so)" OSTINATO_TEST_SANITIZER=$(2) \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
		TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 \
		$(BIN)/python -m pytest --capture=sys --confcutdir=tests/native tests/native $(PYTEST_ARGS)
endef

.PHONY: native-sanitize
native-sanitize: $(VENV)/.installed ## The native tests under AddressSanitizer and UBSan
	$(call sanitize,build-san,address$(COMMA)undefined,libasan.so libubsan.so)

.PHONY: native-tsan
native-tsan: $(VENV)/.installed ## The native tests under ThreadSanitizer
	$(call sanitize,build-tsan,thread,libtsan.so)

$(VENV)/.wheels: $(SOURCES)
	$(call install,dev$(COMMA)wheels,$@ $(VENV)/.installed $(VENV)/.demo)

# PYTHONS and TORCHES replace the interpreters that are found and the two versions of torch; CUDA=1 also downloads builds of
# torch of several GB; WHEELS_ARGS are further options of .ci/wheels.py.
.PHONY: wheels
wheels: $(VENV)/.wheels ## Build sdist and wheels into dist/, check them, run the smoke tests over each in clean environments
	$(BIN)/python .ci/wheels.py $(foreach p,$(PYTHONS),--python $(p)) $(foreach t,$(TORCHES),--torch $(t)) \
		$(if $(CUDA),--cuda) $(WHEELS_ARGS)

.PHONY: clean
clean: ## Remove builds (not .venv)
	rm -rf build build-san build-tsan dist
