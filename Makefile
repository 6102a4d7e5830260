PYTHON ?= python3
PY := .venv/bin/python
export OMP_WAIT_POLICY := passive
.DEFAULT_GOAL := help
# a user's own config or prepare.py is not ours to judge; without git every file is taken
OURS = $(or $(wildcard $(shell git ls-files '*.py' 2>/dev/null)),.)

.PHONY: help demo results test test-all check lint format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /: /' | column -t -s: -l2

demo: .venv/.installed ## install, run the minimum experiment, train a small GPT and sample from it (10 minutes)
	$(PY) experiment.py config/experiments/minimum.py --seeds=0,1,2 --exploratory=true --out_dir=out/minimum
	@$(MAKE) --no-print-directory out/pystdlib/.trained
	$(PY) evaluate.py --checkpoint=out/pystdlib/best.pt
	$(PY) meters.py --checkpoint=out/pystdlib/best.pt
	$(PY) plot.py out/pystdlib
	$(PY) sample.py --checkpoint=out/pystdlib/best.pt --start="def main(" --num_samples=1 --max_new_tokens=240

test: .venv/.installed-dev ## the tests, then ruff and mypy (CI runs this)
	$(PY) -m pytest -n 2 -m "not slow"
	@$(MAKE) --no-print-directory lint

check: .venv/.installed-dev ## make check MIXER=name: what a mixer promises, in seconds
	MIXER=$(MIXER) $(PY) -m pytest tests/test_contract.py

test-all: .venv/.installed-all ## every test, the slow ones that train models and run fla's kernels too
	$(PY) -m pytest -n 2
	@$(MAKE) --no-print-directory lint

results: .venv/.installed ## every table, figure and report of results/ again, from the rows
	for rows in results/*/rows.jsonl; do $(PY) experiment.py config/experiments/$$(basename $$(dirname $$rows)).py --run=false || exit 1; done

lint: .venv/.installed-dev ## ruff, on the files that git knows, and mypy, on the hints of public functions
	$(PY) -m ruff check $(OURS)
	$(PY) -m ruff format --check $(OURS)
	$(PY) -m mypy

format: .venv/.installed-dev ## let ruff format the code
	$(PY) -m ruff format .

clean: ## remove what the demo and the tests made (not .venv)
	rm -rf out .pytest_cache .ruff_cache .mypy_cache .hypothesis data/*/*.npy data/*/*.json data/*/.*.json
	rm -rf data/*/.nanogate data/*/.new data/*/lock
	find data -type d -empty -delete

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: needs Python 3.11 or later, $(PYTHON) is older; make PYTHON=python3.12 takes another"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/.installed: requirements.txt | .venv/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/.installed-dev: requirements-dev.txt .venv/.installed
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

.venv/.installed-all: requirements-all.txt .venv/.installed-dev
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-all.txt
	@touch $@

data/pystdlib/meta.json: | .venv/.installed
	$(PY) data/pystdlib/prepare.py

out/pystdlib/.trained: | .venv/.installed data/pystdlib/meta.json
	$(PY) train.py config/pystdlib.py --init_from=auto
	@touch $@
