# A newcomer needs two commands: `make tour` and `make test`. Each creates .venv first if it is missing or out of date.
PYTHON ?= python3
PY := .venv/bin/python
# Developers keep the corpus in ../shared/data. Others set GLASSFORMER_DATA, or the text is downloaded.
export GLASSFORMER_DATA ?= $(wildcard ../shared/data)
# The tests start many processes. With bytecode files, each of them does not compile the package again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: tour test test-all lint types docs site notebooks pictures release-check clean

tour: .venv/installed
	$(PY) -m glassformer tour

test: .venv/installed
	$(PY) -m pytest

test-all: .venv/installed
	$(PY) -m pytest -m ""

lint: .venv/installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# the package, and then a user's file with the strict settings of a user
types: .venv/installed
	$(PY) -m mypy
	MYPYPATH=src $(PY) -m mypy --strict --follow-imports=silent --config-file= tests/api_usage.py

# docs/claims.md and docs/errata.md from the claims, docs/presets.md from
# the presets and devices, docs/run_file.md from the fields of a run,
# docs/commands.md from the parsers
docs: .venv/installed
	$(PY) -m glassformer.theory.claims.documents
	$(PY) -m glassformer.cli.page

# the documentation as a site with search, in docs/_build; a warning is an error
site: .venv/installed
	$(PY) -m sphinx -q -W --keep-going -b html docs docs/_build

# run the notebooks and store their outputs; some minutes
notebooks: .venv/installed
	$(PY) notebooks/run.py

# draw the pictures of docs/gallery and docs/images/studio again; some minutes, needs Chromium
pictures: .venv/installed
	$(PY) -m tests.docs.pictures

# everything that must hold before a release; the wheel is built, installed and used outside the tree
release-check: lint types site test-all
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt build 'setuptools>=77'
	$(PY) -m glassformer.bench.developer.release

# torch comes first and is pinned: an unpinned torch downloads gigabytes of CUDA libraries that a CPU machine cannot use
.venv/installed: pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy 'setuptools>=77' wheel
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation \
		-e ".[dev,studio,theory,hub,logs,data,export,tokenizers,peers,docs]"
	touch $@

clean:
	rm -rf .venv build docs/_build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
