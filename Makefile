# All targets run in .venv, which the first one creates. `make demo` and `make test` work on a fresh machine with
# Python 3.11+ (with its headers and venv module), a C compiler and make.

PYTHON ?= python3
BIN := .venv/bin
KERNEL_SOURCES := $(wildcard pyx/*.pyx pyx/*.pxd pyx/*.h pyx/keys/*.pyx pyx/keys/*.pxd pyx/keys/*.h bench/*.pyx)

# The tests start hundreds of processes: their imports are compiled to bytecode once, whatever the machine's setting.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-train test evidence neighbours pythons versions lint types checked tsan sanitize fuzz mutations faults rounds weekly \
	follow-histories cluster bench instructions docs dist release-check proto stub clean \
	tpu-matrix tpu-small gpu-aot

demo: .venv/running
	$(BIN)/penstock demo --dir build/demo

# A small two-tower model in plain JAX with its tables in penstock, checked against dense tables (docs/activations.md).
demo-train: .venv/installed
	$(BIN)/python examples/two_tower.py

# On every CPU; ARGS="-n0 -x -k gate": in one process, to the first failure. The outcomes are for `make neighbours`.
# Most cases of products of settings, and most random examples, are left to `make evidence` (tests/support/evidence.py).
test: .venv/installed
	$(BIN)/python -m pytest -m "not evidence" -n auto --dist worksteal --junitxml=build/outcomes/test.xml $(ARGS)

# ROTATION=3/10: a tenth of it, as .ci/run does.
EVIDENCE ?= 1
evidence: .venv/installed
	PENSTOCK_EVIDENCE=$(EVIDENCE) $(BIN)/python -m pytest -m evidence -n auto --dist worksteal \
		--junitxml=build/outcomes/evidence.xml $(ARGS)

# The tests that the last `make test` and `make evidence` skipped, with the libraries of .ci/neighbours.txt. A test that
# is skipped here too is an error, except for the reasons of .ci/skips.txt.
OUTCOMES = build/outcomes/test.xml $(wildcard build/outcomes/evidence.xml)
neighbours: build/neighbours/installed
	@test -f build/outcomes/test.xml || { echo "no tests were skipped yet: run make test first" >&2; exit 1; }
	$(BIN)/python tests/support/skips.py list $(OUTCOMES) >build/outcomes/skipped.txt
	PYTHONPATH=$(CURDIR)/build/tree JAX_PLATFORMS=cpu build/neighbours/bin/python -m pytest -n auto --dist worksteal \
		--junitxml=build/outcomes/neighbours.xml $(ARGS) @build/outcomes/skipped.txt
	$(BIN)/python tests/support/skips.py check $(OUTCOMES) build/outcomes/neighbours.xml

# Every check, whole, into bench/results/weekly.md: also those that .ci/run takes turns at, and those of hours.
weekly: .venv/installed
	$(BIN)/python tests/support/weekly.py $(ARGS)

# The demo and the tests, in clones: on every Python from 3.11 to 3.14 that is here, and with the lowest and the newest
# versions of the libraries. A line for each in bench/results/suites.md. `make pythons ARGS='--only "Python 3.12"
# --pytest "-n 2"' PYTHONS=/opt/python3.14/bin/python3` runs one of them; PYTHONS names further executables.
pythons versions:
	PYTHONS=$(PYTHONS) $(PYTHON) tests/support/suite_runs.py $@ $(ARGS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	cd build/tree && MYPYPATH=../../tests/support ../../$(BIN)/mypy --config-file ../../pyproject.toml -p penstock -m typing_examples
	cd build/tree && ../../$(BIN)/python -m mypy.stubtest --mypy-config-file ../../pyproject.toml \
		--ignore-unused-allowlist --allowlist ../../tests/support/stubtest_allowlist.txt \
		$(subst /,.,$(patsubst %.pyi,penstock.%,$(wildcard pyx/*.pyi pyx/keys/*.pyi bench/*.pyi)))

# The kernel tests with bounds checks, built in a separate tree. -O1 halves the compile time.
checked: .venv/installed
	PENSTOCK_CHECKED=1 PENSTOCK_OPTIMIZE=-O1 $(BIN)/python setup.py -q build --build-base build/checked \
		--build-lib build/checked/lib >build/checked.log 2>&1 || { cat build/checked.log >&2; exit 1; }
	PYTHONPATH=build/checked/lib $(BIN)/python -c \
		'import sys; from penstock.pyx import accumulator as a; sys.exit("/checked/" not in a.__file__ and a.__file__)'
	PYTHONPATH=build/checked/lib $(BIN)/python -m pytest $(foreach name,kernels accumulator_kernel directory \
		directory_returns directory_twin initial_rows,tests/pyx/test_$(name).py) $(ARGS)

# The kernels built with ThreadSanitizer, and threads over gate, accumulators and sums. Exit code 66: a race.
# `make tsan ARGS="--break gate"` removes the gate's lock and must report a race ("--break parts": in a sum; "--break
# rows": in an update, by ids that are not distinct; "--break seqlock": torn rows, without counters of pages).
tsan: .venv/installed
	bash tests/support/sanitize/tsan.sh $(BIN)/python $(ARGS)

# The kernels built with AddressSanitizer and UndefinedBehaviorSanitizer, under the tests that need neither jax nor
# pyarrow and under Arrow-shaped buffers. Exit code 66: a report. `make sanitize ARGS="--break overrun"` (or overflow)
# injects such an error and must report it.
sanitize: .venv/installed
	bash tests/support/sanitize/asan.sh $(BIN)/python $(ARGS)

# Thousands of damaged files and configurations through the command line (docs/evidence/reliability.md).
# `make fuzz ARGS="--cases 500 --seed 7"`; a failing case is kept in build/fuzz, with the command that reproduces it.
fuzz: .venv/installed
	PYTHONPATH=tests/support $(BIN)/python -m fuzz $(ARGS)

# 30 small changes of the code, of which `make test` must notice 27, and evidence the others. About 15 minutes; an interrupted command continues.
# The table is written to tests/support/mutations/results.txt.
mutations: .venv/installed
	PYTHONPATH=tests/support $(BIN)/python -m mutations $(ARGS)

# Fault injection: 1,000 kills at random moments, and a kill and an error at every file operation. `--only NAME` repeats
# one; `--passes 3`, `--placement cached` or `shared` does it to replays of that kind. Then 500 signals in the first two seconds of a command; `make faults SIGNALS="--cases 50"`.
faults: .venv/installed
	$(BIN)/python tests/support/faults/run.py $(ARGS)
	$(BIN)/python tests/support/faults/signals.py $(SIGNALS)

# 2,000 random histories of services, stores and followers, after make neighbours (docs/evidence/reliability.md). `make
# follow-histories CASES=50 SEED=7`; a failing history is printed with the command that repeats it. The table is written
# to tests/support/histories/results.txt.
CASES ?= 2000
SEED ?= 1
follow-histories: build/neighbours/installed
	PYTHONPATH=$(CURDIR)/build/tree:tests/support JAX_PLATFORMS=cpu build/neighbours/bin/python -m histories \
		--cases $(CASES) --seed $(SEED) --record $(ARGS)

# Jobs on a Ray cluster, after make neighbours: 100 kills of readers, owners, nodes and drivers, then jobs of every size
# against one process (docs/evidence/reliability.md). `make cluster ROUNDS=1`: 4 kills.
ROUNDS ?= 25
cluster: build/neighbours/installed
	PYTHONPATH=$(CURDIR)/build/tree JAX_PLATFORMS=cpu build/neighbours/bin/python tests/support/cluster/kills.py --rounds $(ROUNDS)
	PYTHONPATH=$(CURDIR)/build/tree JAX_PLATFORMS=cpu build/neighbours/bin/python tests/support/cluster/matrix.py $(ARGS)

# Rounds, after make neighbours: 2,000 random cases against a loop of NumPy, 300 jobs whose service and workers are
# killed, and kills of jobs of torchrun (docs/explanation/gates.md). About an hour.
rounds: build/neighbours/installed
	PENSTOCK_EVIDENCE=long $(BIN)/python -m pytest -m evidence tests/core/test_rounds.py
	$(BIN)/python tests/support/round_kills.py --cases 300
	for job in 'service 20' 'rank 20' 'all 10'; do PYTHONPATH=$(CURDIR)/build/tree JAX_PLATFORMS=cpu \
		build/neighbours/bin/python tests/support/torchrun_kills.py $$job || exit 1; done

# A smoke test of the harness: small sizes, no other libraries. For figures: penstock bench --help, docs/evidence/performance.md.
bench: .venv/installed
	$(BIN)/penstock bench 'w1/*' '*/coalesce' '*/adagrad' --short --peers none $(ARGS)

# The instructions of a step on 1, 2, 8 and 32 threads, by function, with valgrind; `make instructions ARGS="--threads 1,8"`.
instructions: .venv/installed
	$(BIN)/python bench/experiments/instructions.py $(ARGS)

# The site: every warning is an error, and the build fetches nothing. A version is a folder of SITE (to publish, a copy
# of the published site), next to versions.json and an index.html that leads to the newest.
# To read it: python -m http.server -d build/site
SITE ?= build/site
docs: .venv/installed
	$(INSTALL_PENSTOCK) '.[docs]'
	version=$$($(BIN)/python -c 'import penstock; print(penstock.__version__)') && \
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --site-dir $(SITE)/$$version

# Every step compiled for every generation of TPU, into bench/results/tpu-matrix.md (about an hour on one core;
# finished cases are kept, so that it can be interrupted). tpu-small is the sample that CI compiles in `make neighbours`.
tpu-matrix: build/tpu/installed
	PYTHONPATH=build/tree build/tpu/bin/python -m penstock.bench.tpu.matrix \
		--results build/tpu/results.jsonl --write bench/results/tpu-matrix.md $(ARGS)
	PYTHONPATH=build/tree build/tpu/bin/python -m penstock.bench.tpu.cached_steps
	PYTHONPATH=build/tree build/tpu/bin/python -m penstock.bench.tpu.row_steps

tpu-small: build/tpu/installed
	PYTHONPATH=build/tree build/tpu/bin/python -m penstock.bench.tpu.matrix --small $(ARGS)
	PYTHONPATH=build/tree build/tpu/bin/python -m penstock.bench.tpu.functional_step --small
	PYTHONPATH=build/tree build/tpu/bin/python -m penstock.bench.tpu.row_steps --small
	PYTHONPATH=build/tree build/tpu/bin/python -m penstock.bench.tpu.exchanged_step
	PYTHONPATH=build/tree build/tpu/bin/python -m penstock.bench.tpu.cached_steps v5e

# Every step compiled for an H200, without a GPU (about 600 MB to install); ARGS=--small is the sample that CI compiles.
gpu-aot: build/gpu/installed
	PYTHONPATH=build/tree build/gpu/bin/python -m penstock.bench.gpu.compiled_steps $(ARGS)
	for library in flax keras; do PYTHONPATH=build/tree JAX_PLATFORMS=cpu KERAS_BACKEND=jax \
		build/gpu/bin/python examples/next_word_$$library.py --compile-for h200 || exit 1; done

# In a separate environment: with these plugins installed, every start of jax looks for a GPU. The versions are jax's.
build/gpu/installed: .venv/installed
	$(BIN)/python -m venv build/gpu
	jax=$$(sed -n 's/^jax==//p' .ci/constraints.txt); build/gpu/bin/python -m pip install -q --disable-pip-version-check \
		-c .ci/constraints.txt jax jax-cuda12-plugin==$$jax jax-cuda12-pjrt==$$jax nvidia-cuda-nvcc-cu12 flax keras optax pyarrow protobuf
	touch $@

# In a separate environment: with libtpu installed, every start of jax looks for a TPU.
build/tpu/installed: .venv/installed
	$(BIN)/python -m venv build/tpu
	build/tpu/bin/python -m pip install -q --disable-pip-version-check -c .ci/constraints.txt 'jax[tpu]' pyarrow protobuf
	touch $@

# In a separate environment, because users need none of these libraries; penstock and its kernels are those of this tree.
# The packages of .venv are those of this environment too (the .pth file), so that none is installed twice.
# If they cannot all be installed, as many as possible are.
build/neighbours/installed: .ci/neighbours.txt .venv/installed
	$(BIN)/python -m venv --clear build/neighbours
	packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(BIN)/python -c "$$packages" >"$$(build/neighbours/bin/python -c "$$packages")/tests.pth"
	pip="build/neighbours/bin/python -m pip install -q --disable-pip-version-check -c .ci/constraints.txt"; \
	$$pip -r .ci/neighbours.txt || \
	for library in $$(grep -v '^#' .ci/neighbours.txt); do \
		$$pip "$$library" || echo "cannot be installed, so that tests are skipped: $$library" >&2; \
	done
	touch $@

# The files of a release in dist/: sdist and wheel, built twice and compared, checked, and an SBOM (RELEASING.md).
release-check: build/release-tools/installed
	build/release-tools/bin/python tests/support/release_check.py $(ARGS)

build/release-tools/installed: .ci/release.txt
	$(PYTHON) -m venv build/release-tools
	build/release-tools/bin/python -m pip install -q --disable-pip-version-check -r .ci/release.txt
	touch $@

dist: .venv/installed
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

proto: .venv/installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -c .ci/constraints.txt grpcio-tools==1.75.1
	PYTHON=$(CURDIR)/$(BIN)/python sh engine/model/config/generate.sh

# The public names of engine/__init__.py, for type checkers.
stub: .venv/installed
	$(BIN)/python tests/support/public_stub.py

# The exact versions that CI uses; users of the package are bound only by pyproject.toml. `make demo` installs only the
# runtime dependencies; every other target also installs the developers' tools, and EXTRAS.
CONSTRAINTS ?= .ci/constraints.txt
EXTRAS ?= dev
SOURCES := pyproject.toml setup.py $(CONSTRAINTS) $(KERNEL_SOURCES)
PIP_INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS)
# pip captures the output of builds: setup.py writes its progress to the standard error of the recipe. Cython is that of
# .venv: kernels that an earlier target has translated and compiled are those of this one.
INSTALL_PENSTOCK = $(PIP_INSTALL) --upgrade cython setuptools && \
	PENSTOCK_PROGRESS=/proc/$$$$/fd/2 $(PIP_INSTALL) --no-build-isolation -e

define MAKE_VENV
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "penstock needs Python 3.11 or newer, found " + sys.version)'
test -x $(BIN)/python || $(PYTHON) -m venv .venv || { rm -rf .venv; \
	echo "cannot make .venv: install Python's venv module (Debian: apt install python3-venv python3-dev)" >&2; exit 1; }
@echo "installing penstock and its dependencies into .venv, and compiling its kernels: one to three minutes"
endef

.venv/running: $(SOURCES)
	$(MAKE_VENV)
	$(INSTALL_PENSTOCK) .
	touch $@

.venv/installed: $(SOURCES)
	$(MAKE_VENV)
	$(INSTALL_PENSTOCK) '.[$(EXTRAS)]'
	touch .venv/running $@

clean:
	rm -rf .venv build dist *.egg-info pyx/*.so pyx/keys/*.so bench/*.so
