.DEFAULT_GOAL := help
.PHONY: help venv demo test slow lint docs lock sbom bench ui clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := runs
JOBS ?= 2

# The platform whose files the locks have; on any other, constraints.txt pins the versions alone.
LOCKED := linux-x86_64 3.11
PLATFORM = $(shell $(PYTHON) -c "import sys, sysconfig; print(sysconfig.get_platform(), '%d.%d' % sys.version_info[:2])")

# Data sets kept beside the checkout are used where they are; everything else is fetched on demand.
ifneq ($(wildcard ../shared/data),)
export NARROWCAST_DATA ?= $(abspath ../shared/data)
endif

help: ## what can be made
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /make \1\t/' | expand -t 12

venv: $(VENV)/installed ## the virtual environment, with pinned versions

$(VENV)/installed: pyproject.toml constraints.txt $(wildcard locks/*.txt)
	$(PYTHON) -m venv $(VENV)
	if [ "$(PLATFORM)" = "$(LOCKED)" ]; then \
	  $(BIN)/python -m pip install --quiet --require-hashes --no-deps -r locks/runtime.txt -r locks/development.txt && \
	  { $(BIN)/python -m pip install --quiet --require-hashes --no-deps -r locks/torch-cpu.txt 2> /dev/null || \
	    $(BIN)/python -m pip install --quiet --require-hashes --no-deps -r locks/torch-cuda.txt; } && \
	  $(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e '.[dev]'; \
	else \
	  $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'; \
	fi
	touch $@

demo: venv ## SCoLR on MovieLens-100K with unequal links, on a local Ray
	$(BIN)/narrowcast data fetch ml-100k
	$(BIN)/narrowcast run scolr-ml100k --output $(RUNS)

lint: venv ## style and types
	$(BIN)/ruff check src tests benchmarks hatch_build.py
	$(BIN)/ruff format --check src tests benchmarks hatch_build.py
	$(BIN)/mypy

test: lint ## style, types and all tests but the slow ones
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow"

# One more worker than cores, as these tests wait for processes, outages and leases a good part of their time.
slow: venv ## the slow tests: kills, outages and real clusters
	$(BIN)/python -m pytest -n $$(( $(JOBS) + 1 )) --dist loadfile -m slow

docs: venv ## the documentation site, in build/docs/index.html; warnings are errors, external links are listed
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going -b html -d build/doctrees docs build/docs
	$(BIN)/sphinx-build --quiet --fail-on-warning -b linkcheck -d build/doctrees docs build/links

lock: ## locks/*.txt anew from constraints.txt: the sha256 of every file, for Linux on x86-64 and Python 3.11
	$(PYTHON) .ci/lock.py

# In an environment of its own: with its packages every import of Ray, in each of its processes, takes 2 s more.
sbom: venv ## build/sbom.cdx.json: every installed package with its version, licence and dependencies (CycloneDX)
	$(PYTHON) -m venv build/sbom
	build/sbom/bin/python -m pip install --quiet \
	  $(if $(subst $(LOCKED),,$(PLATFORM)),-c constraints.txt cyclonedx-bom,--require-hashes --no-deps -r locks/sbom.txt)
	build/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-file build/sbom.cdx.json $(VENV)

bench: venv ## seconds per round here and on Ray, beside plain loops and other platforms
	$(BIN)/python benchmarks/seconds_per_round.py
	$(BIN)/python benchmarks/factorisation_step.py
	$(BIN)/python benchmarks/populations.py
	$(BIN)/python benchmarks/actors.py
	$(BIN)/python benchmarks/codecs.py
	$(BIN)/python benchmarks/allocation.py
	$(BIN)/python benchmarks/peers/compare.py

ui: venv ## the MLflow UI on the runs made here
	$(BIN)/narrowcast ui --output $(RUNS)

clean: ## remove the virtual environment and caches, keep the runs
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
