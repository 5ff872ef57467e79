# `make help` lists the targets.

# The first of these that runs: pyenv has commands for releases that are not selected.
PYTHON ?= $(or $(shell for one in python3.11 python3.12 python3.13; do $$one -c '' 2>/dev/null && echo $$one && break; done),python3)
# DEVICE is set by the user, or detected for the targets that serve: gpu if nvidia-smi lists a GPU.
# All other targets use the CPU builds.
ifndef DEVICE
DEVICE := $(if $(filter run install doctor,$(MAKECMDGOALS)),$(shell timeout 10 nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && echo gpu))
endif
ifeq ($(DEVICE),gpu)
VENV := .venv-gpu
LOCK := requirements-gpu.lock
KIND := gpu-development
SIZE := 4 GB to download
CONFIG ?= configs/gpu.yaml
else
VENV := .venv
LOCK := requirements-cpu.lock
KIND := development
SIZE := 3 GB
CONFIG ?= configs/local.yaml
endif
BIN := $(VENV)/bin
PORT ?=
ADDRESS ?=
TESTS ?=
BUDGET_S ?= 600
# Two processes start engines; the third runs the other files (conftest.py).
PARALLEL ?= -n 3 --dist loadscope --no-loadscope-reorder
# Tests that only compute run at niceness 19, beside the others. Ray actors have niceness 5
# (conftest.py).
PURE = tests/planning tests/protocol tests/actors/policy tests/store tests/configs tests/k8s tests/differential benchmarks
CPU_FEATURES ?=
NAME :=
ONLY ?=
STEPS ?=
WHOLE ?=
# Any environment with torch, numpy, xxhash and NIXL works.
GPU_PYTHON ?= $(firstword $(wildcard .venv-gpu/bin/python .venv/bin/python) python3)
STAMP := $(VENV)/.installed
# Reports other CPU features to torch and vLLM in every process of a run (testing/cpu_features).
ifneq ($(CPU_FEATURES),)
export TANDEM_CPU_FEATURES := $(CPU_FEATURES)
export PYTHONPATH := $(CURDIR)/testing/cpu_features$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

# Variables of the command line, as NAME='value': options of campaigns and benchmarks.
OPTIONS = $(foreach one,$(filter-out NAME PYTHON DEVICE CPU_FEATURES,$(.VARIABLES)),$(if \
    $(filter command%,$(origin $(one))),$(one)='$($(one))'))

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@echo "tandem: making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "tandem: install Python 3.11, 3.12 or 3.13 with venv, or set PYTHON" >&2; exit 1; }

$(STAMP): $(LOCK) pyproject.toml k8s/install.sh k8s/torch-from-pypi.txt | $(BIN)/python
	@echo "tandem: installing $(LOCK) into $(VENV) (about $(SIZE) the first time)"
	k8s/install.sh $(VENV) $(KIND)
	@touch $@

.PHONY: install
install: $(STAMP) ## Install the pinned packages into .venv, or .venv-gpu where there is an NVIDIA GPU: PYTHON=python3.12 DEVICE=cpu|gpu

.PHONY: run
run: $(STAMP) ## Serve until Ctrl-C: CONFIG=configs/local.yaml PORT=8000 VERBOSE=1 DEVICE=cpu|gpu; ADDRESS=auto joins a Ray cluster
	@exec $(BIN)/tandem run --config $(CONFIG) $(if $(PORT),--port $(PORT)) $(if $(ADDRESS),--address $(ADDRESS))

.PHONY: doctor
doctor: $(STAMP) ## Check this machine before it serves: CONFIG=configs/local.yaml
	@$(BIN)/tandem doctor --config $(CONFIG)

.PHONY: two-hosts
two-hosts: $(STAMP) ## Serve until Ctrl-C on two hosts, which are namespaces of this machine (root)
	@exec $(BIN)/python -m tests.campaigns.hosts.two_hosts

.PHONY: test
test: $(STAMP) ## Run the suite beside lint, formatting and types: TESTS=tests/actors for a part, CPU_FEATURES=amx_tile=0
ifdef TESTS
	$(BIN)/python -m pytest $(TESTS)
else
	@mkdir -p build
	@(nice -n 19 $(BIN)/python -m pytest --durations=10 $(PURE); tests=$$?; nice -n 19 $(SHELL) -c "$(CHECK)" && exit $$tests) \
		> build/pure.log 2>&1 & pure=$$!; \
	$(BIN)/python -m pytest $(PARALLEL) --durations=30 --budget-s=$(BUDGET_S) $(PURE:%=--ignore=%); \
	code=$$?; wait $$pure || code=$$?; cat build/pure.log; exit $$code
endif

CHECK = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/mypy

.PHONY: check
check: $(STAMP) ## Check lint, formatting, import layers and types
	$(CHECK)

.PHONY: test-all
test-all: $(STAMP) ## Run the suite and all campaigns that decide a release; resumable: ONLY="identity fuzz", WHOLE=1
	$(BIN)/python -m tests.campaigns release $(if $(ONLY),ONLY='$(ONLY)') $(if $(WHOLE),WHOLE=1)

# What a benchmark needs besides $(VENV).
VLLM_ROUTER := build/vllm-router/bin/vllm-router
RAY_LLM := build/ray-llm/bin/python
BENCH_NEEDS = $(if $(filter router service overload,$(NAME)),$(VLLM_ROUTER)) $(if $(filter service,$(NAME)),$(RAY_LLM))

.PHONY: campaign
campaign: $(STAMP) ## Run a long test by name, without NAME list all: NAME=faults COUNT=20 SEED=2
	@$(BIN)/python -m tests.campaigns $(NAME) $(OPTIONS)

.PHONY: bench
bench: $(STAMP) $(BENCH_NEEDS) ## Run a benchmark by name, without NAME list all: NAME=handover REQUESTS=12 TP=1:2
	@$(BIN)/python -m benchmarks $(NAME) $(OPTIONS)

$(VLLM_ROUTER):
	$(PYTHON) -m venv build/vllm-router
	build/vllm-router/bin/pip install --quiet vllm-router==0.1.17

# Ray Serve LLM needs pyarrow besides Tandem's packages, and pins a vLLM without a CPU build.
# So this environment uses the packages of $(VENV) through a .pth file.
$(RAY_LLM): $(STAMP)
	$(PYTHON) -m venv build/ray-llm
	echo $(abspath $(VENV))/lib/python3*/site-packages > $$(echo build/ray-llm/lib/python3*/site-packages)/tandem.pth
	build/ray-llm/bin/pip install --quiet --no-deps pyarrow

.PHONY: emulated-gpu
emulated-gpu: ## Run pairs of engines on an emulated GPU, without one (slow): STEPS="mamba preemption"
	$(MAKE) install DEVICE=gpu
	.venv-gpu/bin/python -m pip install --quiet $$(grep -E '^pytest(-asyncio|-timeout)?==' requirements-cpu.lock)
	.venv-gpu/bin/python -m testing.emulated_gpu $(STEPS)

.PHONY: gpu-check
gpu-check: ## Check Tandem on this machine's NVIDIA GPUs in 5 minutes: GPU_PYTHON=python3
	@$(GPU_PYTHON) -m tests.campaigns gpu-check

build/lock/bin/uv:
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet uv==0.13.9

.PHONY: lock-gpu
lock-gpu: $(STAMP) build/lock/bin/uv ## Resolve requirements-gpu.lock, keeping the releases that pyproject.toml still allows
	$(BIN)/python -m tests.campaigns.gpu_lock build/lock/bin/uv

.PHONY: check-vllm
check-vllm: $(STAMP) ## Compare what Tandem uses of vLLM with a release, from its wheel: VERSION=0.33.0
	@$(BIN)/python -m tests.campaigns.vllm_release "$(VERSION)"

.PHONY: clean
clean: ## Remove caches and build outputs, not the environments
	rm -rf build *.egg-info .pytest_cache .import_linter_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
