# Needs Python 3.10-3.12 with its venv module, and make; everything else goes into .venv.
#   make bench PYTHON=python3.12                       another interpreter (after `make clean`)
#   PYTEST_ADDOPTS="--preset standard" make bench      options for pytest
#   make study STUDY=mine.toml STUDY_FOLDER=mine       another study
#   make test WORKERS=6                                test processes: more than cores, because some tests wait
#   make test DURATIONS=0                              list how long all tests took, not only the slowest
#   make bench RESULT=results/mine.json                another file (its series beside it, results/mine.h5)
#   make horovod FRAMEWORKS=torch                      Horovod for fewer frameworks: four minutes each on 2 cores
PYTHON ?= python3
RESULT ?= results/latest.json
WORKERS ?= 4
DURATIONS ?= 20
STUDY ?= studies/frameworks_2core_cpu.toml
STUDY_FOLDER ?= results/study-2core-cpu
FRAMEWORKS ?= torch tensorflow mxnet
VENV := .venv
RUN := $(VENV)/bin/python
SAY := printf 'd5suite: %s\n'

.NOTPARALLEL:
.PHONY: help bench study horovod test test-all test-long lint docs clean

help:
	@echo "make bench      measure the recipes on the CPU frameworks (about 4 minutes on 2 cores); $(RESULT)"
	@echo "make study      run the study of frameworks and write its report (up to 3 hours; go on: again)"
	@echo "make horovod    build Horovod for the frameworks (12 minutes on 2 cores, once on a machine)"
	@echo "make test       test what most users do, on few cases (12 minutes on 2 cores)"
	@echo "make test-all   run every test, those of make test among them (40 minutes)"
	@echo "make test-long  run the tests that make test leaves out"
	@echo "make lint       check style and types"
	@echo "make docs       build the documentation as a site (a minute; build/docs/index.html)"
	@echo "make clean      remove the environment and the caches; results stay"

bench: $(VENV)/installed
	@mkdir -p $(dir $(RESULT))
	@$(SAY) "measuring; samples go to $(RESULT)"
	@$(RUN) -m pytest recipes/ --benchmark-json $(RESULT)

# Interrupted, it goes on when it is called again.
study: $(VENV)/installed
	@$(RUN) -m d5suite.cli study $(STUDY) --resume -o $(STUDY_FOLDER)

# Horovod has no wheels for these frameworks. For Keras it uses the build for TensorFlow or PyTorch.
horovod: $(VENV)/installed
	@$(RUN) third_party/horovod/build.py $(FRAMEWORKS)

# Tests that measure time run afterwards, one at a time. Both parts run even if the first one fails.
# OMP_WAIT_POLICY: waiting threads yield, so that the other test processes can work. OPENBLAS_NUM_THREADS:
# arrays of tests are small, and two threads on one CPU wait for each other. XLA_FLAGS: tests ask whether answers
# are right, not fast, so JAX compiles without optimization. The tests start hundreds of processes: Python's bytecode is
# kept, and JAX's compiled programs are kept for the rest of the run. KERASLESS: TensorFlow would import Keras in every
# process; this setting asks for the old Keras, which is not installed. Horovod for TensorFlow needs Keras, though.
# MALLOC: freed memory is kept for the next array, because the kernel takes long to hand out pages.
# A failed test is repeated once and listed as rerun: other load on the machine disturbs processes, ports and clocks, but
# a real fault fails twice.
test test-all test-long: $(VENV)/installed-test
	@rm -rf $(COMPILED); failed=; \
	$(QUICKLY) $(RUN) -m pytest tests/ -n $(WORKERS) --dist worksteal $(RETRY) -m "($(CHOSEN)) and not alone" || failed=yes; \
	$(QUICKLY) $(RUN) -m pytest $(ALONE_IN) $(RETRY) -m "($(CHOSEN)) and alone" || failed=yes; \
	test -z "$$failed"
# Only files with such tests are imported for the second part: the others import five frameworks.
ALONE_IN = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests | sort)
RETRY := --reruns 1 --rerun-show-tracebacks --durations $(DURATIONS) --durations-min 1
test: CHOSEN := not slow
KERASLESS := $(if $(wildcard $(VENV)/lib/python*/site-packages/horovod/tensorflow/mpi_lib*.so),,TF_USE_LEGACY_KERAS=1)
COMPILED := .pytest_cache/d/jax
QUICKLY := OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(KERASLESS) \
	MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296 \
	XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true \
	--xla_cpu_use_fusion_emitters=false" \
	JAX_COMPILATION_CACHE_DIR="$(CURDIR)/$(COMPILED)" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
test-all: CHOSEN := not quick
test-long: CHOSEN := slow

lint: $(VENV)/installed-test
	@failed=; for check in "ruff check ." "ruff format --check ." mypy; do \
		$(SAY) "$$check"; $(RUN) -m $$check || failed=yes; \
	done; test -z "$$failed"

# A warning fails the build. The pages of the Python API are written anew, since a module may be gone.
docs: $(VENV)/installed-docs
	@rm -rf docs/reference/api build/docs
	@$(RUN) -m sphinx -W --keep-going -q -d build/doctrees docs build/docs
	@$(SAY) "open build/docs/index.html"

clean:
	rm -rf $(VENV) build docs/reference/api dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# A stamp marks a finished installation. An interrupted one leaves half-copied packages that pip considers installed, so
# without the stamp the environment is made again.
define install
@if [ ! -e $(VENV)/installed ]; then \
	$(SAY) "making $(VENV) with $$($(PYTHON) --version)"; \
	$(PYTHON) -m venv --clear $(VENV); \
fi
@rm -f $(VENV)/installed $(VENV)/installed-test
@$(SAY) "installing $(2)"
@$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools
@$(RUN) -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --constraint constraints.txt \
	--no-build-isolation --editable '.[$(1)]'
@$(RUN) -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --constraint constraints.txt \
	--no-deps $(3)
@touch $(VENV)/installed
endef

$(VENV)/installed: pyproject.toml constraints.txt
	$(call install,all,d5suite with its CPU frameworks: about a gigabyte and a few minutes,$(ALONE))

# Needs no framework. The test tools include it.
$(VENV)/installed-docs: pyproject.toml constraints.txt
	@test -e $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(SAY) "installing the tools of the documentation"
	@$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --constraint constraints.txt \
		--no-build-isolation --editable '.[docs]'
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(call install,all$(comma)test,the test tools,$(ALONE) $(ALONE_TEST))
	@touch $@

comma := ,
# Installed without its dependencies: it pins an older NumPy, but works with the newer one (pyproject.toml).
ALONE := mxnet
# Installed without its dependencies: only one of its networks needs torchvision.
ALONE_TEST := pytorchcv
