# Everything runs in a virtual environment, made on first use. With `VENV=` (empty) it runs in
# the current Python instead, which then needs torch 2.11 or later, setuptools and ninja.
#
#   TORCH='torch==2.12.*'   another torch than the one bootstrap.py would pick
#   FLASH_MLA_KERNELS=on    fail without nvcc (off: never build kernels)
#   MAX_JOBS=2              compilers at a time
#   ARGS='-k plan -x'       more arguments for pytest or the demo

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

ifeq ($(VENV),)
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

.PHONY: help build demo test vllm-lib clean

help:
	@echo 'make demo      one decode step, on the GPU if it is an SM90, else on CPU tensors'
	@echo 'make test      the tests; those that need an SM90 GPU are skipped without one'
	@echo 'make build     the library, flash_mla/_flashmla_C.abi3.so'
	@echo 'make vllm-lib  the drop-in for vLLM, build/vllm/_flashmla_C.abi3.so'
	@echo 'make clean     remove what was built, but not the virtual environment'

# pyproject.toml and the build tools name what has to be installed
$(VENV)/.ready: pyproject.toml build_tools/bootstrap.py build_tools/toolchain.py
	$(PYTHON) build_tools/bootstrap.py $(VENV)

build: $(READY)
	$(PY) -m build_tools.build

vllm-lib: $(READY)
	$(PY) -m build_tools.build vllm

demo: build
	PYTHONPATH=. $(PY) examples/demo.py $(ARGS)

test: build vllm-lib
	$(PY) -m pytest $(ARGS)

clean:
	rm -rf build flash_mla/_flashmla_C.abi3.so flash_mla.egg-info
