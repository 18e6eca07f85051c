# One target per step of CI. Everything runs in .venv, which is made on first use and made anew
# when pyproject.toml or constraints.txt change. Needs Python 3.10 or newer, and nothing else.
#
#   make demo PYTHON=python3.12          another interpreter
#   make demo PIP_ARGS="..."             options for pip install

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made-from-constraints
PROTOS := $(notdir $(wildcard proto/graphsplit/*.proto))
# `=` maps the folder, so that generated modules import each other as graphsplit._proto.NAME.
PROTOC = $(BIN)/python -m grpc_tools.protoc -Igraphsplit/_proto=proto/graphsplit
SOURCES := graphsplit examples tests benchmarks docs
DEMO_ARGS ?= --epochs 40 --lr 0.02
PYTEST_ARGS ?=
BENCH_ARGS ?=
FUZZ_ARGS ?=
KILL_ARGS ?=
MODEL_ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-torch test-zoo test-launchers lint types contracts walk proto proto-check pytest format docs bench fuzz fuzz-changes model-check kill-matrix network-matrix clean venv

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP) ## train LeNet on a scheduler and five workers, on a small set that is built in
	DATA_PATH= PYTHON="$(CURDIR)/$(BIN)/python" bash examples/lenet_mnist/run.sh $(DEMO_ARGS)

# One after the other, whatever -j says: the first failure is the one that is shown last.
test: $(STAMP) ## every check: lint, types, contracts, proto-check, walk, pytest
	@set -e; for step in lint types contracts proto-check walk pytest; do \
		echo "== $$step"; $(MAKE) --no-print-directory $$step; done

lint: $(STAMP) ## ruff: rules and formatting
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

test-all: export ALL_COMBINATIONS := 1
test-all: export ALL_PLACEMENTS := 1
test-all: test ## make test with all combinations of parameters and all placements; takes hours

types: $(STAMP) ## mypy --strict on the library, the examples and the simulator of the tests
	$(BIN)/mypy graphsplit examples tests/simulated

contracts: $(STAMP) ## imports run one way only
	$(BIN)/lint-imports

walk: $(STAMP) ## how many files a training step goes through; no more than today
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/walk.py --most-files 22 --most-changes 70

# Tests that start processes have bounds on time, so they run alone; the others share the cores.
# Workers that are threads wait for each other about a third of the time: so more runs than cores.
# What Python compiles is kept, whatever the environment says: hundreds of processes import it again.
pytest: $(STAMP) ## the tests; PYTEST_ARGS="-k name" picks some
	@set -e; export PYTHONDONTWRITEBYTECODE=; run() { echo "$(BIN)/python -m pytest $$*"; \
		$(BIN)/python -m pytest "$$@" $(PYTEST_ARGS) || [ $$? -eq 5 ]; }; \
	runs=$$($(BIN)/python -c 'import os; print((os.cpu_count() or 1) * 3 // 2)'); \
	run -n "$$runs" --dist loadfile -m "not real_processes and not zoo and not fuzz"; \
	run -m "real_processes and not zoo"

# With a GPU's torch this downloads gigabytes. A version that pyproject.toml leaves out may be named.
TORCH_SAMPLE := tests/torch_contract tests/capture tests/equivalence/test_lenet.py \
	tests/equivalence/test_eager_paths.py tests/equivalence/test_mixed_precision.py
test-torch: ## the contract with torch, and a sample, under another one: make test-torch TORCH=2.14.1
	@test -n "$(TORCH)" || { echo "Fix: make test-torch TORCH=2.14.1" >&2; exit 1; }
	test -d .venv-torch-$(TORCH) || $(PYTHON) -m venv .venv-torch-$(TORCH)
	grep -v '^torch==' constraints.txt | .venv-torch-$(TORCH)/bin/python -m pip install \
		--disable-pip-version-check $(PIP_ARGS) -r /dev/stdin 'torch==$(TORCH)'
	.venv-torch-$(TORCH)/bin/python -m pip install --disable-pip-version-check --no-deps -e .
	OMP_NUM_THREADS=1 .venv-torch-$(TORCH)/bin/python -m pytest $(TORCH_SAMPLE) \
		-m "not real_processes and not fuzz" $(PYTEST_ARGS)

test-zoo: $(STAMP) ## every model of the zoo under every kind of placement; takes a while
	$(BIN)/python -m pytest -n auto tests/zoo -m zoo $(PYTEST_ARGS)

# apt-get needs root. `make test` runs what of this is there, and says at its end what it left out.
LAUNCHERS := mpich openmpi-bin openssh-client openssh-server munge slurm-client slurmctld slurmd
test-launchers: $(STAMP) ## jobs started by SSH, Ray, torchrun, MPI, srun and as pods; installs them, on Debian
	dpkg --status $(LAUNCHERS) > /dev/null || apt-get install -y --no-install-recommends $(LAUNCHERS)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) 'ray>=2.9'
	$(BIN)/python -m pytest tests/launchers $(PYTEST_ARGS)

proto: $(STAMP) ## generate graphsplit/_proto from proto/
	$(PROTOC) --python_out=. --pyi_out=. $(addprefix graphsplit/_proto/,$(PROTOS))

proto-check: $(STAMP) ## what is in graphsplit/_proto is what proto/ gives
	@fresh="$$(mktemp -d)"; trap 'rm -rf "$$fresh"' EXIT; \
	$(PROTOC) --python_out="$$fresh" --pyi_out="$$fresh" $(addprefix graphsplit/_proto/,$(PROTOS)) \
	&& diff -ru -x __init__.py -x __pycache__ "$$fresh/graphsplit/_proto" graphsplit/_proto \
	|| { echo "graphsplit/_proto is out of date: run 'make proto' and commit the result" >&2; exit 1; }

format: $(STAMP) ## let ruff rewrite the sources
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

docs: $(STAMP) ## build the API reference as HTML under docs/_build
	$(BIN)/python docs/build_api.py

# The tests run a few seconds of each.
fuzz: $(STAMP) ## ten million hostile frames, hundreds of hostile sessions; FUZZ_ARGS="--frames N"
	$(BIN)/python tests/fuzz/frame_fuzzer.py $(FUZZ_ARGS)
	$(BIN)/python tests/fuzz/session_fuzzer.py

fuzz-changes: $(STAMP) ## thousands of random changes, hundreds of random programs; all placements of tests
	ALL_COMBINATIONS=1 ALL_PLACEMENTS=1 $(BIN)/python -m pytest -n auto -m "not real_processes and not zoo" \
		tests/equivalence $(PYTEST_ARGS)

# The tests explore all of one failure. MODEL_ARGS="--rules NAME --kinds kill,break --jobs N"
model-check: $(STAMP) ## everything that three workers can do while two things go wrong
	$(BIN)/python tests/cluster/membership_check.py $(MODEL_ARGS)

# The tests run five of them. KILL_ARGS="--only PATTERN --jobs N"; rows that are there are kept.
kill-matrix: $(STAMP) ## every process in every phase killed, stopped, or raising: 864 runs
	$(BIN)/python tests/matrix/kill_matrix.py --out kill-matrix.jsonl $(KILL_ARGS)
	$(BIN)/python tests/matrix/table.py kill-matrix.jsonl

# Needs root: hosts are network namespaces of its own. NETWORK_ARGS="--select PATTERN --seeds 0,1"
network-matrix: $(STAMP) ## the network cut, slow, losing and doubling packets, in every phase: 79 runs
	$(BIN)/python tests/matrix/network/run.py --out network-matrix.jsonl $(NETWORK_ARGS)
	$(BIN)/python tests/matrix/table.py network-matrix.jsonl

bench: $(STAMP) ## measure every row of the table, and write JSON under benchmarks/results/local
	$(BIN)/python benchmarks/run_all.py $(BENCH_ARGS)

venv: $(STAMP) ## make .venv only

clean: ## remove .venv, caches and what runs left behind
	rm -rf $(VENV) .venv-torch-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache examples/*/run docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "Python 3.10 or newer is needed, but '$(PYTHON)' is not one." >&2; \
		echo "Fix: install it, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON) -m venv' cannot work here: the module ensurepip is missing." >&2; \
		echo "Fix on Debian or Ubuntu: apt install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@
