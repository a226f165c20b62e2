# Every target sets up .venv by itself. The machine needs python3 (3.11 or newer, with venv), a C++20 compiler and make;
# CMake, Ninja and everything else come from pip into .venv.
#
# The package is installed in editable mode: Python sources are used where they are, and a change of a native source (or
# of what describes the build, or of the list of Python modules) makes the next target build again, incrementally, in
# build/.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory --no-builtin-rules

PYTHON ?= python3
SEEDS ?= 1000
SOAK_MINUTES ?= 10
FAULTS ?= 200
MINUTES ?= 10
BENCH ?= allreduce --world 2,4 --sizes 4K,64K,1M,16M --against none

# The tests start thousands of processes. Where the environment forbids bytecode files, each would compile Ringfold again.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
NATIVE := $(shell find native include -type f \( -name '*.cpp' -o -name '*.c' -o -name '*.hpp' -o -name '*.h' -o -name '*.inc' -o -name 'CMakeLists.txt' \) 2>/dev/null)
MODULES := $(sort $(shell find src/ringfold -name '*.py'))
STEP = @printf '\033[1m== %s\033[0m\n' "$(1)"

.PHONY: help demo test check lint types tidy sim soak faults fuzz fuzz-native bench native-test native-tidy native-tidy-changed native-check native-check-address native-check-thread tsan-e2e docs clean

help:
	@cat <<'TEXT'
	make demo          train on four peers while some are killed, frozen and added (under a minute); says where its report is
	make test          all tests: native, unit, transcripts, simulation (100 seeds), real processes
	make extras        PyTorch, aiohttp, Playwright and others into .venv; without them their tests are skipped
	make check         ruff, clang-format, mypy --strict, the tidy test, and clang-tidy over changed files
	make sim           the simulation, SEEDS=1000; SEED=N replays one
	make soak          real peers and masters, then ranks and stores, killed and frozen, SOAK_MINUTES=10 each
	make faults        a peer killed or stopped in an op in shared memory, FAULTS=200 times
	make fuzz          hostile input and fresh examples for MINUTES=10; what is found is kept in tests/fuzz/corpus
	make bench         a short all-reduce benchmark; BENCH="recovery --peers 4" for another
	make plot          docs/images/allreduce-16-cores.svg from the reports in benchmarks/results
	make screenshots   docs/images/dashboard-*.png again (needs Chromium; like a desktop's with the font Inter)
	make native-tidy   clang-tidy over all native files
	make native-check  the native tests under ASan and UBSan, then under TSan
	make tsan-e2e      some of the tests with real processes, with the native module under TSan
	make fuzz-native   the native parsers under libFuzzer, all of them for MINUTES=10 together (needs clang)
	make coverage      the lines of Python and native code that the tests run; build/coverage/coverage.json has them all
	make same-results  compare the outcomes of two runs: make test RESULTS=build/one, then the same with OTHER=build/one
	make docs          write the reference pages again
	make clean         remove everything that was built
	TEXT

# The environment, in two steps so that a changed C++ file does not ask pip for the build tools again.

.venv/.tools: | compiler
	$(call STEP,setting up .venv)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
	  echo "error: $(PYTHON) is not Python 3.11 or newer. If you have one by another name: make PYTHON=python3.12" >&2
	  exit 1
	}
	$(PYTHON) -m venv .venv || {
	  echo "error: $(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2
	  exit 1
	}
	$(PIP) install 'scikit-build-core>=0.11,<2' 'nanobind>=2.9,<4' 'cmake>=3.22' ninja
	touch $@

# The editable install maps modules to files when it is made: after a pull that moves a module, imports would fail. So it
# is made again when the list of modules has changed, and only then.
.venv/.modules: list-modules | .venv/.tools
	@cmp -s $@ <(printf '%s\n' $(MODULES)) || printf '%s\n' $(MODULES) > $@

.PHONY: list-modules
list-modules:

.venv/.ready: .venv/.tools .venv/.modules pyproject.toml CMakeLists.txt $(NATIVE)
	$(call STEP,building Ringfold)
	export PATH="$(CURDIR)/$(BIN):$$PATH"
	mkdir -p build
	$(PIP) install --no-build-isolation --editable '.[test,dev]' $(MODULE_SETTINGS) > build/install.log 2>&1 || {
	  grep -nE 'error|Error|ERROR' build/install.log | head -n 40 >&2
	  echo "error: the build failed; all of it is in build/install.log" >&2
	  exit 1
	}
	touch $@

# The native tests are configured beside the module and link the same library, so that it is compiled once and they run
# what is shipped; pip builds the module, and the test module, which only development builds have.
MODULE := build/module
MODULE_SETTINGS := --config-settings=build-dir=$(MODULE) '--config-settings=build.targets=_native;_native_testing;ringfold_guardian' \
  --config-settings=cmake.define.RINGFOLD_NATIVE_TESTS=ON

.PHONY: compiler
compiler:
	@command -v "$${CXX:-c++}" > /dev/null || command -v g++ > /dev/null || command -v clang++ > /dev/null || {
	  echo "error: no C++ compiler found. Install one with C++20 (on Debian and Ubuntu: apt install g++), or set CXX." >&2
	  exit 1
	}

# What only some tests need. `make test` uses what is in .venv and skips the rest.
#
# The release of PyTorch is fixed; where pip finds no build of it for CPUs, it takes the one for CUDA, which is large:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu has the other. Triton is for its interpreter, without a GPU.
EXTRAS ?= torch==2.13.0 safetensors>=0.4,<1 mpi4py>=4,<5 triton>=3.3,<4 aiohttp>=3.11,<4 playwright>=1.50,<2 axe-playwright-python>=0.1.4,<1 \
  textual>=8,<9 opentelemetry-sdk>=1.28,<2 opentelemetry-exporter-otlp-proto-http>=1.28,<2

.PHONY: extras
extras: .venv/.ready
	$(call STEP,optional packages: $(EXTRAS))
	set -f
	for package in $$(printf '%s' '$(EXTRAS)'); do
	  $(PIP) install "$$package" || echo "no $$package: its tests are skipped"
	done

# What people run

demo: .venv/.ready
	@$(BIN)/ringfold demo --peers 4

test: .venv/.ready native-test
	$(call STEP,unit tests$(comma) transcripts$(comma) simulation)
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal $(call JUNIT,pure) tests/sim tests/unit tests/transcripts tests/fuzz
	$(call STEP,the native module$(comma) real processes: those that wait$(comma) five at a time$(comma) then the others$(comma) three at a time)
	$(BIN)/python -m pytest -q -n 5 --dist worksteal -m waiting $(call JUNIT,waiting) tests/e2e
	$(BIN)/python -m pytest -q -n 3 --dist worksteal -m 'not waiting' $(call JUNIT,real) tests/native tests/e2e
	$(BIN)/python tests/results.py $(RESULTS)

# The outcome of every test, as JUnit files; `make same-results RESULTS=one OTHER=two` compares two runs.
RESULTS ?= build/results
OTHER ?= build/results-before
JUNIT = --junitxml=$(RESULTS)/$(1).xml

.PHONY: same-results
same-results: .venv/.ready
	@$(BIN)/python tests/results.py $(RESULTS) $(OTHER)

check: lint types tidy native-tidy-changed

lint: .venv/.ready
	$(call STEP,ruff and clang-format)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(filter-out %CMakeLists.txt,$(NATIVE))

# Test files import each other by name, from the folders that the conftest files put on sys.path. Some names occur in two
# folders, so they are checked one after the other; each needs a cache of its own.
UNIT_FOLDERS := $(subst $() ,:,$(patsubst %/,%,$(filter-out %/__pycache__/,$(sort $(wildcard tests/unit/*/)))))
TEST_TYPES = $(BIN)/mypy --config-file tests/mypy.ini --cache-dir .mypy_cache/$(1)

types: .venv/.ready
	$(call STEP,mypy --strict)
	$(BIN)/mypy
	MYPYPATH=src:tests:$(UNIT_FOLDERS) $(call TEST_TYPES,unit) tests/unit tests/sim tests/native tests/transcripts \
	  tests/planted tests/*.py examples
	MYPYPATH=src:tests:tests/e2e $(call TEST_TYPES,e2e) tests/e2e
	MYPYPATH=src $(call TEST_TYPES,fuzz) tests/fuzz

tidy: .venv/.ready
	$(call STEP,tidy test)
	$(BIN)/python -m pytest -q tests/unit/test_tidy.py

sim: .venv/.ready
	$(call STEP,simulation$(if $(SEED), of seed $(SEED), with $(SEEDS) seeds))
	$(BIN)/python -m ringfold.testing $(if $(SEED),--seed $(SEED) --trace,--seeds $(SEEDS))
	$(if $(SEED),,for mode in failover stalls channels hosts resume runs samples probing iterations; do $(BIN)/python -m ringfold.testing --$$mode --seeds $(SEEDS); done)
	$(if $(SEED),,PYTHONPATH=tests $(BIN)/python -m planted)

soak: .venv/.ready
	$(call STEP,soak for $(SOAK_MINUTES) minutes)
	$(BIN)/ringfold soak --minutes $(SOAK_MINUTES)
	$(BIN)/ringfold soak --iterations --minutes $(SOAK_MINUTES)
	$(BIN)/ringfold soak --members --minutes $(SOAK_MINUTES)

faults: .venv/.ready
	$(call STEP,$(FAULTS) faults in shared memory)
	$(BIN)/python -m pytest -q -s tests/e2e/test_shared_memory_faults.py --faults $(FAULTS) \
	  --faults-seed $(if $(SEED),$(SEED),$$RANDOM)

# A third of the time is for the native targets, where there are any. A finding of one half does not keep the other from
# looking; Ctrl-C (130) ends both.
fuzz: .venv/.ready
	$(call STEP,fuzz for $(MINUTES) minutes)
	native=0 found=0
	if grep -q '^fuzz-native:' $(MAKEFILE_LIST); then native=$$(( $(MINUTES) / 3 )); fi
	$(BIN)/python -m tests.fuzz --minutes $$(( $(MINUTES) - native )) || found=$$?
	if [ $$found -ne 130 ] && [ $$native -gt 0 ]; then $(MAKE) fuzz-native MINUTES=$$native || found=$$?; fi
	exit $$found

bench: .venv/.ready
	@$(BIN)/ringfold bench $(BENCH)

RESULTS_16 = $(sort $(wildcard benchmarks/results/allreduce-16-cores*.json))

.PHONY: plot
plot: .venv/.ready
	@test -n "$(RESULTS_16)" || { echo "error: no benchmarks/results/allreduce-16-cores*.json" >&2; exit 1; }
	$(BIN)/ringfold bench plot $(RESULTS_16) -o docs/images/allreduce-16-cores.svg

.PHONY: screenshots
screenshots: .venv/.ready
	$(BIN)/python -m ringfold.tools.screenshots docs/images

docs: .venv/.ready
	$(call STEP,reference pages and the native stub)
	$(BIN)/python -m ringfold.cli.reference docs/reference
	for module in _native _native_testing; do
	  $(BIN)/python -m nanobind.stubgen -q -p native/bindings/stub.pat -m ringfold.$$module -o src/ringfold/$$module.pyi
	done

# The native tests know no Python: once as shipped, and once with each of the sanitizers, by plain CMake

native-test: .venv/.ready
	$(call STEP,native tests)
	export PATH="$(CURDIR)/$(BIN):$$PATH"
	cmake --build $(MODULE) > $(MODULE)/build.log 2>&1 || {
	  grep -nE 'error|Error|FAILED' $(MODULE)/build.log | head -n 40 >&2
	  echo "error: the build failed; all of it is in $(MODULE)/build.log" >&2
	  exit 1
	}
	mkdir -p $(RESULTS)
	ctest --test-dir $(MODULE)/native --output-on-failure --no-tests=error --progress --output-junit $(abspath $(RESULTS))/native.xml

# clang-tidy takes seconds for each file: `make check` runs it over those that differ from the last commit.
# It reads the compile commands that the build of the module writes. It is large, so it is installed when it is needed.
CLANG_TIDY_PACKAGE ?= clang-tidy>=22,<24

native-tidy: .venv/.ready
	$(call STEP,clang-tidy)
	$(call RUN_CLANG_TIDY,$(filter %.cpp,$(NATIVE)))

native-tidy-changed: .venv/.ready
	$(call STEP,clang-tidy of changed files)
	$(call RUN_CLANG_TIDY,$$(git diff --name-only --diff-filter=d HEAD -- 'native/*.cpp'))

define RUN_CLANG_TIDY
files=($(1))
[ $${#files[@]} -gt 0 ] || exit 0
[ -x $(BIN)/clang-tidy ] || $(PIP) install '$(CLANG_TIDY_PACKAGE)'
printf '%s\n' "$${files[@]}" | xargs -P "$$(nproc)" -n 1 $(BIN)/clang-tidy --quiet -p $(MODULE)
endef

native-check: native-check-address native-check-thread

native-check-address: .venv/.tools
	$(call STEP,native tests under ASan and UBSan)
	export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
	$(call NATIVE_TESTS,build/sanitize,-DRINGFOLD_SANITIZE=address)

native-check-thread: .venv/.tools
	$(call STEP,native tests under TSan)
	export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
	$(call NATIVE_TESTS,build/sanitize-thread,-DRINGFOLD_SANITIZE=thread)

# The module under TSan has an environment of its own. It borrows the packages of .venv, but not its link to the usual module.
# Python itself is not instrumented: only what our code does counts.
TSAN_TESTS ?= tests/native/test_driving.py tests/native/test_bulk.py tests/e2e/test_threads.py tests/e2e/test_api.py \
  tests/e2e/test_collectives.py
TSAN := build/tsan-e2e

tsan-e2e: .venv/.ready
	$(call STEP,real processes under TSan)
	export PATH="$(CURDIR)/$(BIN):$$PATH"
	mkdir -p $(TSAN)
	[ -x $(TSAN)/venv/bin/python ] || $(BIN)/python -m venv --without-pip $(TSAN)/venv
	packages() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
	packages $(BIN)/python > "$$(packages $(TSAN)/venv/bin/python)/borrowed.pth"
	$(PIP) --python $(TSAN)/venv/bin/python install --no-build-isolation --no-deps --force-reinstall \
	  -C build-dir=$(TSAN)/build -C cmake.define.RINGFOLD_SANITIZE=thread \
	  -C cmake.define.nanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)" . > $(TSAN)/install.log 2>&1 || {
	  grep -nE 'error|Error|ERROR' $(TSAN)/install.log | head -n 40 >&2
	  echo "error: the build failed; all of it is in $(TSAN)/install.log" >&2
	  exit 1
	}
	rm -f $(TSAN)/report.*
	status=0
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libtsan.so)" \
	  TSAN_OPTIONS=ignore_noninstrumented_modules=1:exitcode=0:log_path=$(CURDIR)/$(TSAN)/report \
	  $(TSAN)/venv/bin/python -m pytest -q -p no:cacheprovider $(TSAN_TESTS) || status=$$?
	if compgen -G '$(TSAN)/report.*' > /dev/null; then
	  cat $(TSAN)/report.* | head -n 200 >&2
	  echo "error: TSan has found something; all of it is in $(TSAN)/report.*" >&2
	  status=1
	fi
	exit $$status

FUZZ_TARGETS := $(sort $(patsubst native/fuzz/fuzz_%.cpp,%,$(wildcard native/fuzz/fuzz_*.cpp)))
FUZZ_CXX ?= clang++
# Of each program; two run at a time.
FUZZ_SECONDS ?= $(shell echo $$(($(MINUTES) * 120 / $(words $(FUZZ_TARGETS)))))

fuzz-native: .venv/.tools
	$(call STEP,fuzzing $(FUZZ_TARGETS)$(comma) $(FUZZ_SECONDS) s each)
	command -v $(FUZZ_CXX) > /dev/null || {
	  echo "error: no $(FUZZ_CXX). libFuzzer comes with clang (on Debian and Ubuntu: apt install clang); or set FUZZ_CXX." >&2
	  exit 1
	}
	export PATH="$(CURDIR)/$(BIN):$$PATH"
	mkdir -p build/fuzz
	{ cmake -S . -B build/fuzz -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER=$(FUZZ_CXX) -DRINGFOLD_FUZZ=ON \
	    -DRINGFOLD_SANITIZE=address && cmake --build build/fuzz --parallel 2; } > build/fuzz/build.log 2>&1 || {
	  grep -nE 'error|Error|FAILED' build/fuzz/build.log | head -n 40 >&2
	  echo "error: the build failed; all of it is in build/fuzz/build.log" >&2
	  exit 1
	}
	native/fuzz/run.sh $(FUZZ_SECONDS) $(FUZZ_TARGETS)

define NATIVE_TESTS
export PATH="$(CURDIR)/$(BIN):$$PATH"
mkdir -p $(1)
{ cmake -S . -B $(1) -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DRINGFOLD_NATIVE_TESTS=ON $(2) \
  && cmake --build $(1); } > $(1)/build.log 2>&1 || {
  grep -nE 'error|Error|FAILED' $(1)/build.log | head -n 40 >&2
  echo "error: the build failed; all of it is in $(1)/build.log" >&2
  exit 1
}
ctest --test-dir $(1)/native --output-on-failure --no-tests=error --progress
endef

# Coverage of both languages by all tests, with a module of its own that counts: an environment that takes its packages
# from .venv and differs only in Ringfold. Tests that fail are shown and counted all the same.

COVERAGE := build/coverage
COVERED := $(COVERAGE)/venv/bin/python -m coverage
COVERAGE_SETTINGS := --config-settings=build-dir=$(COVERAGE)/module '--config-settings=build.targets=_native;_native_testing;ringfold_guardian' \
  --config-settings=cmake.define.RINGFOLD_NATIVE_TESTS=ON --config-settings=cmake.define.RINGFOLD_COVERAGE=ON

.PHONY: coverage
coverage: .venv/.ready
	$(call STEP,building with counters)
	export PATH="$(CURDIR)/$(BIN):$$PATH"
	mkdir -p $(COVERAGE)
	$(BIN)/python -m venv --without-pip $(COVERAGE)/venv
	$(BIN)/python -c 'import site; print(*site.getsitepackages())' > $(COVERAGE)/packages.pth
	cp $(COVERAGE)/packages.pth $(COVERAGE)/venv/lib/python3*/site-packages/
	{ $(PIP) --python $(COVERAGE)/venv install --no-build-isolation --editable '.[coverage]' $(COVERAGE_SETTINGS) \
	  && cmake --build $(COVERAGE)/module; } > $(COVERAGE)/build.log 2>&1 || {
	  echo "error: the build failed; all of it is in $(COVERAGE)/build.log" >&2
	  exit 1
	}
	find $(COVERAGE) \( -name '*.gcda' -o -name '.counts*' \) -delete
	export COVERAGE_FILE="$(CURDIR)/$(COVERAGE)/.counts"
	$(call STEP,all tests$(comma) counting)
	ctest --test-dir $(COVERAGE)/module/native --output-on-failure --progress || true
	$(COVERED) run -m pytest -q -n auto --maxprocesses 4 --dist worksteal tests/unit tests/transcripts tests/sim || true
	$(COVERED) run -m pytest -q -n 4 --dist worksteal -m waiting tests/e2e || true
	$(COVERED) run -m pytest -q -n 2 --dist worksteal -m 'not waiting' tests/native tests/e2e || true
	$(COVERED) combine --quiet
	$(COVERED) json --quiet -o $(COVERAGE)/python.json
	$(BIN)/python tests/covered.py $(COVERAGE)/python.json $(COVERAGE)/module $(COVERAGE)/coverage.json

comma := ,

clean:
	@rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/ringfold/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
