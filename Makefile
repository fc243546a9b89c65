# Needs Python 3.10-3.12 with its venv module, and make; everything else goes into .venv.
#   make bench PYTHON=python3.12                       another interpreter (after `make clean`)
#   PYTEST_ADDOPTS="--preset standard" make bench      options for pytest
#   make test WORKERS=4                                test processes: more than cores, since some tests wait
#   make bench RESULT=results/mine.json                another file (its series beside it, results/mine.h5)
#   make horovod FRAMEWORKS=torch                      Horovod for fewer frameworks: four minutes each on two cores
PYTHON ?= python3
RESULT ?= results/latest.json
WORKERS ?= 3
FRAMEWORKS ?= torch tensorflow mxnet
VENV := .venv
RUN := $(VENV)/bin/python
SAY := printf 'd5suite: %s\n'

.NOTPARALLEL:
.PHONY: help bench horovod test test-all lint clean

help:
	@echo "make bench      measure the recipes on the CPU frameworks and print a table ($(RESULT))"
	@echo "make horovod    build Horovod for the frameworks (12 minutes on 2 cores, once on a machine)"
	@echo "make test       test every behaviour and every adapter, on fewer cases (11 minutes on 2 cores)"
	@echo "make test-all   run every test, those of make test among them (43 minutes)"
	@echo "make lint       check style and types"
	@echo "make clean      remove the environment and the caches; results stay"

bench: $(VENV)/installed
	@mkdir -p $(dir $(RESULT))
	@$(SAY) "measuring; samples go to $(RESULT)"
	@$(RUN) -m pytest recipes/ --benchmark-json $(RESULT)

# It has no wheel for these frameworks. Keras takes those of TensorFlow or PyTorch.
horovod: $(VENV)/installed
	@$(RUN) third_party/horovod/build.py $(FRAMEWORKS)

# Tests that measure time run after the others, beside none; both parts run, whatever the first one finds. Threads that
# wait let the other process's work. Tests ask whether answers are right, not fast, so JAX compiles them quickly. They
# start hundreds of processes, which keep what Python compiles whatever the environment says, and what JAX compiles for
# the rest of the run. TensorFlow imports Keras for none: this setting leaves room for the old Keras, which no test uses.
# But Horovod for TensorFlow, where it is built, takes Keras from it.
# A test that fails is tried once more and listed as rerun: real processes, ports and clocks are disturbed by what else
# the machine does; what is wrong fails twice.
test test-all: $(VENV)/installed-test
	@rm -rf $(COMPILED); failed=; \
	$(QUICKLY) $(RUN) -m pytest tests/ -n $(WORKERS) --dist worksteal $(RETRY) -m "($(CHOSEN)) and not alone" || failed=yes; \
	$(QUICKLY) $(RUN) -m pytest $(ALONE_IN) $(RETRY) -m "($(CHOSEN)) and alone" || failed=yes; \
	test -z "$$failed"
# The others' files need not be imported again: they import five frameworks.
ALONE_IN = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)
RETRY := --reruns 1 --rerun-show-tracebacks
test: CHOSEN := not slow
KERASLESS := $(if $(wildcard $(VENV)/lib/python*/site-packages/horovod/tensorflow/mpi_lib*.so),,TF_USE_LEGACY_KERAS=1)
COMPILED := .pytest_cache/d/jax
QUICKLY := OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(KERASLESS) \
	XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true \
	--xla_cpu_use_fusion_emitters=false" \
	JAX_COMPILATION_CACHE_DIR="$(CURDIR)/$(COMPILED)" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
test-all: CHOSEN := not quick

lint: $(VENV)/installed-test
	@failed=; for check in "ruff check ." "ruff format --check ." mypy; do \
		$(SAY) "$$check"; $(RUN) -m $$check || failed=yes; \
	done; test -z "$$failed"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# A stamp marks a finished install. An interrupted one leaves half-copied packages that pip takes for installed, so
# without the stamp the environment is made afresh.
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

$(VENV)/installed-test: $(VENV)/installed
	$(call install,all$(comma)test,the test tools,$(ALONE) $(ALONE_TEST))
	@touch $@

comma := ,
# Installed without its dependencies: it pins an older NumPy, and works with the others' (pyproject.toml).
ALONE := mxnet
# It wants torchvision, which one of its networks imports.
ALONE_TEST := pytorchcv
