# Needs Python 3.10-3.12 with its venv module, and make; everything else goes into .venv.
#   make bench PYTHON=python3.12                       another interpreter (after `make clean`)
#   PYTEST_ADDOPTS="--preset standard" make bench      options for pytest
#   make bench RESULT=results/mine.json                another file (its series beside it, results/mine.h5)
PYTHON ?= python3
RESULT ?= results/latest.json
VENV := .venv
RUN := $(VENV)/bin/python
SAY := printf 'd5suite: %s\n'

.NOTPARALLEL:
.PHONY: help bench test lint clean

help:
	@echo "make bench   measure the recipes on the CPU frameworks and print a table ($(RESULT))"
	@echo "make test    run d5suite's own tests"
	@echo "make lint    check style and types"
	@echo "make clean   remove the environment and the caches; results stay"

bench: $(VENV)/installed
	@mkdir -p $(dir $(RESULT))
	@touch $(VENV)/bench-started
	@$(SAY) "measuring; samples go to $(RESULT)"
	@$(RUN) -m pytest recipes/ --benchmark-json $(RESULT); status=$$?; \
	if [ $(RESULT) -nt $(VENV)/bench-started ]; then \
		$(VENV)/bin/d5suite compare $(RESULT) || { shown=$$?; [ $$status -ne 0 ] || status=$$shown; }; \
	fi; \
	exit $$status

test: $(VENV)/installed-test
	@$(RUN) -m pytest tests/

lint: $(VENV)/installed-test
	@failed=; for check in "ruff check ." "ruff format --check ." mypy; do \
		$(SAY) "$$check"; $(RUN) -m $$check || failed=yes; \
	done; test -z "$$failed"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# A stamp says that an install has finished. It is gone while one runs, and without it the environment is made afresh,
# because pip takes what an interrupted install left half copied for installed.
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
	--no-deps $(ALONE)
@touch $(VENV)/installed
endef

$(VENV)/installed: pyproject.toml constraints.txt
	$(call install,all,d5suite with its CPU frameworks: about a gigabyte and a few minutes)

$(VENV)/installed-test: $(VENV)/installed
	$(call install,all$(comma)test,the test tools)
	@touch $@

comma := ,
# Installed without what it asks for: it wants an older NumPy than the others, and works with theirs (pyproject.toml).
ALONE := mxnet
