.DEFAULT_GOAL := help
.PHONY: help venv demo test data-tests slow thorough lint docs wheel lock sbom bench ui clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := runs
JOBS ?= 2

# Where it is set, every process of the tests compiles the package, and every worker rewrites the tests' assertions, anew.
unexport PYTHONDONTWRITEBYTECODE

# Data sets kept beside the checkout are used where they are, everything else is fetched on demand; with an empty
# NARROWCAST_DATA in the environment they are not looked at.
ifneq ($(wildcard ../shared/data),)
export NARROWCAST_DATA ?= $(abspath ../shared/data)
endif

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 17

venv: $(VENV)/installed ## the virtual environment, with pinned versions

$(VENV)/installed: pyproject.toml constraints.txt $(wildcard locks/*.txt)
	$(PYTHON) .ci/install.py $(VENV) dev
	touch $@

demo: venv ## SCoLR on MovieLens-100K with unequal links, on a local Ray
	$(BIN)/narrowcast data fetch ml-100k
	$(BIN)/narrowcast run scolr-ml100k --output $(RUNS)

lint: venv ## style and types
	$(BIN)/ruff check src papers tests benchmarks hatch_build.py
	$(BIN)/ruff format --check src papers tests benchmarks hatch_build.py
	$(BIN)/mypy -n $(JOBS)

test: lint ## style, types and all tests but the slow ones; those that need data sets which are not here are left out
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow"

data-tests: venv ## the tests that need data sets, where make test had none
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "data and not slow"

# One more worker than cores, as these tests wait for processes, outages and leases a good part of their time; a worker
# without tests takes some of another's file, as a few files have half of the minutes.
slow: venv ## the slow tests: processes, kills, outages and real clusters; and those that need data sets
	$(BIN)/python -m pytest -n $$(( $(JOBS) + 1 )) --dist worksteal -m "(slow or data) and not thorough"

thorough: venv ## further repetitions of the slow tests: more seeds, damages and histories of the same kinds; an hour
	$(BIN)/python -m pytest -n $(JOBS) --dist load -m thorough

docs: venv ## the documentation site, in build/docs/index.html; warnings are errors, external links are listed
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going -b html -d build/doctrees docs build/docs
	$(BIN)/sphinx-build --quiet --fail-on-warning -b linkcheck -d build/doctrees docs build/links

# From the directory build/wheel, where nothing of the checkout can be imported in place of the wheel.
wheel: venv ## build/wheel/dist: the sdist and, made from it, the wheel, and that of the papers; installed and run in an environment of its own
	rm -rf build/wheel
	$(BIN)/python -m hatchling build -t sdist -d $(CURDIR)/build/wheel/dist
	cd build/wheel && tar -xzf dist/narrowcast-*.tar.gz && cd narrowcast-* && \
	  $(CURDIR)/$(BIN)/python -m hatchling build -t wheel -d $(CURDIR)/build/wheel/dist
	cd papers && $(CURDIR)/$(BIN)/python -m hatchling build -t wheel -d $(CURDIR)/build/wheel/dist
	$(PYTHON) .ci/install.py build/wheel/environment build/wheel/dist/narrowcast-*.whl
	build/wheel/environment/bin/python -m pip install --quiet --no-deps build/wheel/dist/narrowcast_papers-*.whl
	cd build/wheel && environment/bin/narrowcast --version && environment/bin/narrowcast run fedavg-digits rounds=5 --backend local
	cd build/wheel && environment/bin/narrowcast reproduce wireless-table1

lock: ## locks/*.txt anew from constraints.txt: the sha256 of every file, for Linux on x86-64 and Python 3.11
	$(PYTHON) .ci/lock.py

# In an environment of its own: with its packages every import of Ray, in each of its processes, takes 2 s more.
sbom: venv ## build/sbom.cdx.json: every installed package with its version, licence and dependencies (CycloneDX)
	$(PYTHON) .ci/install.py build/sbom sbom
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
