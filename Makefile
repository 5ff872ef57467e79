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
FABRICS ?=
SEED ?= 1
ROUNDS ?= 300
COUNT ?= 4000
OVERLAYS ?=
OVERLAY ?= k8s/overlays/cpu
TRACES ?=
CONNECTOR ?= tandem
FAULTS ?= 200
TP ?= 1:1
LANES ?= 1
OUT ?= build/faults
PAIRS_OUT ?= build/fault-pairs
ONLY ?=
DAMAGE ?=
SCHEDULES ?= 100000
PART ?= 1/1
PROMPTS ?=
KILLS ?=
TIMES ?=
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

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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

.PHONY: two-hosts
two-hosts: $(STAMP) ## Serve until Ctrl-C on two hosts that are simulated by namespaces of this machine (root)
	@exec $(BIN)/python -m tests.campaigns.hosts.two_hosts

.PHONY: two-hosts-test
two-hosts-test: $(STAMP) ## Cut and restore the link between two simulated hosts (root, about 8 minutes)
	$(BIN)/python -m pytest -s tests/campaigns/hosts/nixl_on_two_hosts.py tests/campaigns/hosts/on_two_hosts.py

.PHONY: test
test: $(STAMP) ## Run the whole suite beside lint, formatting and types (15 minutes on two cores): TESTS=tests/actors for a part, CPU_FEATURES=amx_tile=0
ifdef TESTS
	$(BIN)/python -m pytest $(TESTS)
else
	@mkdir -p build
	@(nice -n 19 $(BIN)/python -m pytest --durations=10 $(PURE); tests=$$?; nice -n 19 $(SHELL) -c "$(CHECK)" && exit $$tests) \
		> build/pure.log 2>&1 & pure=$$!; \
	$(BIN)/python -m pytest $(PARALLEL) --durations=30 --budget-s=$(BUDGET_S) $(PURE:%=--ignore=%); \
	code=$$?; wait $$pure || code=$$?; cat build/pure.log; exit $$code
endif

.PHONY: test-all
test-all: $(STAMP) ## Run every campaign that decides a release; write one report (2 hours, WHOLE=1 a night; resumable): ONLY="identity fuzz"
	$(BIN)/python -m tests.campaigns $(if $(ONLY),--only $(ONLY)) $(if $(WHOLE),--whole)

CHECK = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/mypy

.PHONY: check
check: $(STAMP) ## Check lint, formatting, import layers and types
	$(CHECK)

.PHONY: doctor
doctor: $(STAMP) ## Check this machine before it serves: CONFIG=configs/local.yaml
	@$(BIN)/tandem doctor --config $(CONFIG)

build/lock/bin/uv:
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet pip==26.3 uv==0.13.9

.PHONY: lock-gpu
lock-gpu: $(STAMP) build/lock/bin/uv ## Resolve requirements-gpu.lock again, keeping the releases that pyproject.toml still allows
	$(BIN)/python -m tests.campaigns.dependencies.gpu_lock resolve --uv build/lock/bin/uv

.PHONY: check-lock-gpu
check-lock-gpu: $(STAMP) build/lock/bin/uv ## Compare requirements-gpu.lock with what pip would install (may download 4 GB)
	$(BIN)/python -m tests.campaigns.dependencies.gpu_lock check --python build/lock/bin/python

.PHONY: manifests
manifests: $(STAMP) ## Check k8s/ against schemas, KubeRay's rules and Tandem's settings: OVERLAYS=directory
	@$(BIN)/python -m tests.k8s.check $(OVERLAYS)

.PHONY: manifests-kustomize
manifests-kustomize: $(STAMP) ## Compare the rendering of k8s/ by tests/k8s with kustomize's (or kubectl's)
	@$(BIN)/python -m tests.campaigns.manifests.against_kustomize

.PHONY: overlay-serves
overlay-serves: $(STAMP) ## Serve the configuration of an overlay on local Ray nodes, one per pod, and send requests: OVERLAY=k8s/overlays/cpu
	@$(BIN)/python -m tests.campaigns.manifests.overlay_serves $(OVERLAY)

.PHONY: alerts
alerts: $(STAMP) ## Run promtool's tests of the alerts (Debian package prometheus)
	@$(BIN)/python -m tests.campaigns.manifests.promtool

.PHONY: bench
bench: $(STAMP) build/vllm-router/bin/vllm-router build/ray-llm/bin/python ## Measure handover and TTFT in turns with vLLM's own connector, its router, and Ray Serve LLM
	$(BIN)/python -m benchmarks.handover
	$(BIN)/python -m benchmarks.service --vllm-router build/vllm-router/bin/vllm-router --ray-llm build/ray-llm/bin/python

# Ray Serve LLM needs pyarrow besides Tandem's packages, and pins a vLLM without a CPU build.
# So this environment uses the packages of $(VENV) through a .pth file.
build/ray-llm/bin/python: $(STAMP)
	$(PYTHON) -m venv build/ray-llm
	echo $(abspath $(VENV))/lib/python3*/site-packages > $$(echo build/ray-llm/lib/python3*/site-packages)/tandem.pth
	build/ray-llm/bin/pip install --quiet --no-deps pyarrow

.PHONY: bench-exposed
bench-exposed: $(STAMP) ## Measure the part of a transfer that streaming does not hide, over shared memory and a slow link (root)
	$(BIN)/python -m benchmarks.exposed

.PHONY: bench-link
bench-link: $(STAMP) ## Measure TTFT over a link of 800 Mbit/s: streaming, whole requests, vLLM's own connectors (root, 15 minutes)
	$(BIN)/python -m benchmarks.link

.PHONY: bench-first-token
bench-first-token: $(STAMP) ## Measure first and second token over a link of 80 Mbit/s, compared with shared memory, one vLLM engine and NixlConnector (root, 20 minutes)
	$(BIN)/python -m benchmarks.first_token

BASE ?= HEAD~1

.PHONY: bench-store-choice
bench-store-choice: $(STAMP) ## Measure the KV store's choices over links and disks of several rates: regret (root, 20 minutes)
	$(BIN)/python -m benchmarks.store_choice

.PHONY: bench-backlog
bench-backlog: $(STAMP) ## Measure decode under a prefill backlog, in turns with another revision: BASE=revision
	@rm -rf build/base && git worktree prune && git worktree add --detach build/base $(BASE)
	$(BIN)/python -m benchmarks.backlog --before build/base; code=$$?; git worktree remove --force build/base; exit $$code

.PHONY: bench-contacts
bench-contacts: $(STAMP) ## Measure the first contact of 64 decode engines of 8 ranks with one prefill engine: time, scheduler stalls
	$(BIN)/python -m benchmarks.first_contacts

.PHONY: bench-transfer
bench-transfer: $(STAMP) ## Measure transfers beside raw NIXL and memcpy, descriptors and first contact: FABRICS=shm,tcp
	$(BIN)/python -m benchmarks.transfer $(if $(FABRICS),--fabrics $(FABRICS))
	$(BIN)/python -m benchmarks.descriptors
	$(BIN)/python -m benchmarks.kv_layouts
	$(BIN)/python -m benchmarks.contact

build/vllm-router/bin/vllm-router:
	$(PYTHON) -m venv build/vllm-router
	build/vllm-router/bin/pip install --quiet vllm-router==0.1.17

.PHONY: bench-router
bench-router: $(STAMP) build/vllm-router/bin/vllm-router ## Measure latency and CPU time of the router, beside vllm-router (in an environment in build/) and a plain proxy: ROUTERS=2
	$(BIN)/python -m benchmarks.router --vllm-router build/vllm-router/bin/vllm-router $(if $(ROUTERS),--routers $(ROUTERS))

.PHONY: disconnects
disconnects: $(STAMP) ## Send 10,000 requests, half of whose clients disconnect; check counts, leaks and memory
	$(BIN)/python -m benchmarks.router.disconnects

.PHONY: open-streams
open-streams: $(STAMP) ## Hold 10,000 open streams on one router for 10 minutes; measure memory and its growth (20 minutes): STREAMS=2000 MINUTES=1
	$(BIN)/python -m benchmarks.router.open_streams $(if $(STREAMS),--streams $(STREAMS)) $(if $(MINUTES),--minutes $(MINUTES))

.PHONY: rolling-versions
rolling-versions: $(STAMP) ## Restart engines and routers with another version of the RPC protocol under load (3 minutes): OLDER=checkout
	$(BIN)/python -m benchmarks.router.versions $(if $(OLDER),--older $(abspath $(OLDER)))

.PHONY: bench-fleet
bench-fleet: $(STAMP) ## Measure a bookkeeping pass and a decision with 64 engines, and a stream whose router does not read (1 minute)
	$(BIN)/python -m benchmarks.bookkeeping; code=$$?; $(BIN)/python -m benchmarks.slow_reader && exit $$code

.PHONY: bench-promises
bench-promises: $(STAMP) ## Measure the cost of digests, secret and message tags: TTFT and a batch, with and without them
	$(BIN)/python -m benchmarks.promises

.PHONY: routing
routing: $(STAMP) ## Replay loads in a simulated fleet; compare the router's decisions with other policies and an oracle (minutes)
	$(BIN)/python -m benchmarks.routing

.PHONY: scaling
scaling: $(STAMP) ## Replay loads in a simulation under Tandem's and Serve's autoscaling policies: TRACES=recorded.csv
	$(BIN)/python -m benchmarks.scaling $(if $(TRACES),--traces $(TRACES))
	$(BIN)/python -m benchmarks.scaling.plot

.PHONY: identity
identity: $(STAMP) ## Compare tokens and logprobs with those of one engine, at four pairs of TP sizes: PROMPTS=25
	$(BIN)/python -m tests.campaigns.shapes.identity $(if $(PROMPTS),--prompts $(PROMPTS))

.PHONY: data-parallel
data-parallel: $(STAMP) ## Compare data-parallel ranks on either side with one engine, then kill 20 ranks in a service (about an hour): PROMPTS=10 KILLS=2
	TANDEM_DATA_PARALLEL=1 $(BIN)/python -m pytest tests/e2e/test_data_parallel.py
	$(BIN)/python -m tests.campaigns.shapes.data_parallel $(if $(PROMPTS),--prompts $(PROMPTS))
	$(BIN)/python -m tests.campaigns.service.data_parallel --scale $(if $(KILLS),--kills $(KILLS))

.PHONY: placement
placement: $(STAMP) ## Check where Serve places replicas and the ranks of Ray's executor, on a cluster of four nodes (2 minutes)
	TANDEM_PLACEMENT=1 $(BIN)/python -m pytest tests/app/test_deployment_options.py

.PHONY: families
families: $(STAMP) ## Compare every kind of KV cache, between engines of unequal shape, with one engine (about an hour): PROMPTS=5
	$(BIN)/python -m tests.campaigns.shapes.families $(if $(PROMPTS),--prompts $(PROMPTS))

.PHONY: speculation
speculation: $(STAMP) ## Compare speculative decoding after a handover with one engine: tokens, acceptance, pools (15 minutes): PROMPTS=10
	$(BIN)/python -m tests.campaigns.schedules.scheduling --steps 10000 --drafts 3
	$(BIN)/python -m tests.campaigns.shapes.speculation $(if $(PROMPTS),--prompts $(PROMPTS))

.PHONY: adapters
adapters: $(STAMP) ## Send 500 requests over three LoRA adapters and the base model, eight at a time, at two pairs of TP sizes
	$(BIN)/python -m tests.campaigns.shapes.adapters

.PHONY: models
models: $(STAMP) ## Serve two models at one endpoint; load and unload adapters under load, kill a decode engine (10 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaigns.service.models

.PHONY: images
images: $(STAMP) ## Send 50 prompts with one to three images, at two pairs of TP sizes; count encoder runs (5 minutes)
	$(BIN)/python -m tests.campaigns.shapes.images
	$(BIN)/python -m tests.campaigns.service.images

.PHONY: upstream-shapes
upstream-shapes: $(STAMP) ## Run the models of families through vLLM's own connector as well (about an hour): build/upstream-shapes.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaigns.shapes.upstream_shapes
	$(BIN)/python -m tests.campaigns.shapes.upstream_table

.PHONY: faults
faults: $(STAMP) ## Inject faults (kill, stop, cancel, forge): SEED=1 CONNECTOR=tandem|nixl|nixl-push|'{"kv_connector": ...}' FAULTS=200 TP=1:2 DP=2:1 SPECULATION=1 LANES=2
	@mkdir -p $(dir $(OUT))
	$(BIN)/python -m tests.campaigns.faults.campaign --seed $(SEED) --connector '$(CONNECTOR)' --faults $(FAULTS) --tp $(TP) \
	    $(if $(DP),--dp $(DP)) $(if $(SPECULATION),--speculation) --lanes $(LANES) --out $(OUT).json; code=$$?; \
	$(BIN)/python -m tests.campaigns.faults.report $(OUT).json $(OUT).md && echo "tandem: the report is $(OUT).md" && exit $$code

.PHONY: store-faults
store-faults: $(STAMP) ## Inject 10,000 faults into the KV store, without engines (5 minutes): SEED=1 FAULTS=2000
	$(BIN)/python -m tests.campaigns.store.campaign --seed $(SEED) --faults $(if $(filter file,$(origin FAULTS)),10000,$(FAULTS))

.PHONY: store-schedules
store-schedules: $(STAMP) ## Run random steps of vLLM's own scheduler with the KV store; check each token (5 minutes): SEED=1 STEPS=12000
	$(BIN)/python -m tests.campaigns.store.scheduling --steps $(or $(STEPS),48000) --seed $(SEED)

.PHONY: store-conversations
store-conversations: $(STAMP) ## Hold conversations over pairs of engines that are killed between turns: ONLY="llama gemma3"
	$(BIN)/python -m tests.campaigns.store.conversation $(if $(ONLY),--only $(ONLY))

.PHONY: store-restart
store-restart: $(STAMP) ## Kill pairs of engines; others with other TP and block sizes load the stored KV (15 minutes): ONLY="gemma3 llama" PROMPTS=100
	$(BIN)/python -m tests.campaigns.store.restart $(if $(ONLY),--only $(ONLY)) $(if $(PROMPTS),--prompts $(PROMPTS))

.PHONY: store-kills
store-kills: $(STAMP) ## Kill a pair of engines under load ten times, also during writes; the next pair uses its store (20 minutes): ONLY="llama" RESTARTS=3
	$(BIN)/python -m tests.campaigns.store.kills $(if $(ONLY),--only $(ONLY)) $(if $(RESTARTS),--restarts $(RESTARTS))

.PHONY: fault-pairs
fault-pairs: $(STAMP) ## Inject two faults at a time, on a link that can be cut (root, about 3 hours): SEED=1 FAULTS=200 TP=2:1
	@mkdir -p $(dir $(PAIRS_OUT))
	$(BIN)/python -m tests.campaigns.faults.campaign --pairs --seed $(SEED) --faults $(FAULTS) --tp $(if $(filter file,$(origin TP)),2:1,$(TP)) \
	    --lanes $(LANES) --out $(PAIRS_OUT).json; code=$$?; \
	$(BIN)/python -m tests.campaigns.faults.report $(PAIRS_OUT).json $(PAIRS_OUT).md && echo "tandem: the report is $(PAIRS_OUT).md" && exit $$code

.PHONY: stopped-rank
stopped-rank: $(STAMP) ## Stop a rank of a real prefill engine in mid-write, kill its core, continue the rank: COUNT=50
	$(BIN)/python -m tests.campaigns.hosts.stopped_engine_rank $(if $(filter file,$(origin COUNT)),,--count $(COUNT))

.PHONY: emulated-gpu
emulated-gpu: ## Run pairs of engines on an emulated GPU, without one (slow; testing/emulated_gpu): STEPS="mamba preemption"
	$(MAKE) install DEVICE=gpu
	.venv-gpu/bin/python -m pip install --quiet $$(grep -E '^pytest(-asyncio|-timeout)?==' requirements-cpu.lock)
	.venv-gpu/bin/python -m testing.emulated_gpu $(STEPS)

.PHONY: gpu-check
gpu-check: ## Check transport, digests, engines and the service on this machine's NVIDIA GPUs, in 5 minutes; report in build/gpu-check.json: GPU_PYTHON=python3
	@$(GPU_PYTHON) -m tests.campaigns.gpu

.PHONY: latency-breakdown
latency-breakdown: $(STAMP) ## Delay engines of a service, and compare its latency breakdown with the delays: OUT=build/latency_breakdown
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaigns.service.latency_delays --out $(if $(filter file,$(origin OUT)),build/latency_breakdown,$(OUT)).json

.PHONY: corruption
corruption: $(STAMP) ## Check that digests detect 6,000 damaged transfers and accept 10,000 undamaged ones
	TANDEM_CORRUPTION=1 $(BIN)/python -m pytest tests/transport/test_corruption.py

.PHONY: fuzz
fuzz: $(STAMP) ## Send hostile messages, connections and HTTP requests: SEED=1 ROUNDS=300 COUNT=4000
	$(BIN)/python -m tests.campaigns.fuzz.connector --seed $(SEED) --rounds $(ROUNDS)
	$(BIN)/python -m tests.campaigns.fuzz.http --seed $(SEED) --count $(COUNT)

.PHONY: differential
differential: $(STAMP) ## Send 1,397 cases to the service and to one vLLM server; compare the answers (about 10 minutes): ONLY=expression DAMAGE=0.02 FIRST_TOKEN=prefill
	$(BIN)/python -m tests.campaigns.differential.campaign $(if $(ONLY),--only '$(ONLY)') $(if $(DAMAGE),--damage $(DAMAGE)) \
		$(if $(FIRST_TOKEN),--first-token $(FIRST_TOKEN))

.PHONY: seam
seam: $(STAMP) ## Compare 2,000 random streams with one vLLM server's, then kill decode engines before the second token: COUNT=200 TP=1:2 KILLS=10 SEED=1
	$(BIN)/python -m tests.campaigns.differential.campaign --first-token prefill --at-once 12 --seed $(SEED) \
		--streams $(if $(filter file,$(origin COUNT)),2000,$(COUNT)) --tp $(if $(filter file,$(origin TP)),1:2,$(TP))
	$(BIN)/python -m tests.campaigns.differential.seam_deaths --seed $(SEED) $(if $(KILLS),--kills $(KILLS))

build/clients/bin/python:
	$(PYTHON) -m venv build/clients
	build/clients/bin/pip install --quiet langchain-openai anthropic

.PHONY: clients
clients: $(STAMP) build/clients/bin/python ## Run the openai SDK, LangChain and Anthropic's SDK (in an environment in build/), vllm bench serve and curl against the service
	$(BIN)/python -m tests.campaigns.clients.libraries --langchain build/clients/bin/python --anthropic build/clients/bin/python

# The three tools pin releases of each other's packages, so each has an environment.
LOAD_TOOLS := build/load-tools/lm_eval build/load-tools/guidellm build/load-tools/aiperf
build/load-tools/lm_eval: PACKAGES := 'lm-eval[api]' transformers
build/load-tools/guidellm: PACKAGES := guidellm
build/load-tools/aiperf: PACKAGES := aiperf
$(LOAD_TOOLS):
	$(PYTHON) -m venv $@-env
	$@-env/bin/pip install --quiet $(PACKAGES)
	ln -sf $(notdir $@)-env/bin/$(notdir $@) $@

.PHONY: load-tools
load-tools: $(STAMP) $(LOAD_TOOLS) ## Run vllm bench serve (1,000 prompts at once), lm-eval, guidellm and aiperf (in environments in build/) against the service and one vLLM server: ONLY=expression
	$(BIN)/python -m tests.campaigns.clients.load_tools --tools build/load-tools $(if $(ONLY),--only '$(ONLY)')

.PHONY: multi-connector
multi-connector: $(STAMP) ## Send 100 requests through MultiConnector and TandemMultiConnector over several connectors; compare choices and metrics
	$(BIN)/python -m tests.campaigns.service.multi_connector

.PHONY: serve-commands
serve-commands: $(STAMP) ## Run Ray's own commands on a service: serve run, status, config, deploy, build, shutdown (2 minutes)
	$(BIN)/python -m pytest tests/campaigns/service/serve_commands.py

.PHONY: streams
streams: $(STAMP) ## Cut streams of every kind at every token, and kill 40 decode engines under streams (about an hour): KILLS=10
	TANDEM_STREAMS=1 $(BIN)/python -m pytest tests/e2e/test_streams.py tests/e2e/test_decode_death.py
	$(BIN)/python -m tests.campaigns.service.decode_deaths $(if $(KILLS),--last $(KILLS))

.PHONY: rolling-restart
rolling-restart: $(STAMP) ## Replace every replica of a busy service, and scale it down and up (about 10 minutes): TIMES=1
	$(BIN)/python -m tests.campaigns.service.rolling_restart $(if $(TIMES),--times $(TIMES))

.PHONY: head-killed
head-killed: $(STAMP) ## Kill the Ray head of a busy service, without Redis and with it (needs redis-server; 6 minutes): ONLY=redis
	$(BIN)/python -m tests.campaigns.service.head_killed $(if $(ONLY),--only '$(ONLY)')

.PHONY: setting-changes
setting-changes: $(STAMP) ## Change every setting of a running service, and compare the restarts (25 to 35 minutes): ONLY="router. store.path"
	$(BIN)/python -m tests.campaigns.service.setting_changes $(if $(ONLY),--only $(ONLY))

.PHONY: explore
explore: $(STAMP) ## Explore every interleaving of small transfers; print the numbers of states (about an hour): PART=1/6
	$(BIN)/python -m tests.campaigns.protocol.explore --part $(PART)

.PHONY: schedules
schedules: $(STAMP) ## Run random schedules of larger transfers, and random steps of vLLM's scheduler: SCHEDULES=100000 SEED=1
	$(BIN)/python -m tests.campaigns.schedules.schedules --schedules $(SCHEDULES) --seed $(SEED)
	$(BIN)/python -m tests.campaigns.schedules.scheduling --steps 12000 --seed $(SEED)

.PHONY: plans
plans: $(STAMP) ## Compare plans with an independent oracle: all TP sizes, head counts and pairs of block sizes (2 minutes)
	TANDEM_PLANS=1 $(BIN)/python -m pytest tests/planning/test_oracle.py

.PHONY: demo-eval
demo-eval: $(STAMP) ## Measure the demo model's recall on held-out prompts
	$(BIN)/python -m benchmarks.demo_model.evaluate

.PHONY: clean
clean: ## Remove caches and build outputs, not the environments
	rm -rf build *.egg-info .pytest_cache .import_linter_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
