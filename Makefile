# make bench: measure this machine.   make test: the project's checks.
# make lowest: tests of capture, training and torch's devices with the lowest supported torch, on Python 3.13 if present;
#   then tests of trainings over two hosts, one with this torch and one with the usual torch.
#   SHARE=all           make test runs every case of its wide tables and slow tests, not a share of them
#   PYTHON=python3.12   the interpreter that makes the virtual environment (3.10 or newer)
#   TORCH_INDEX=URL     another package index for torch alone, for instance one with CPU-only builds
#   ARGS='...'          more options for the benchmark, see `hetpipe bench --help`

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=
SHARE ?= tree

BIN := $(VENV)/bin
STAMP := $(VENV)/installed
TORCH := $(shell grep '^torch==' constraints.txt)

LOWEST ?= .venv-lowest
LOWEST_PYTHON ?= $(shell python3.13 -c 'import sys; print(sys.executable)' 2>/dev/null || echo $(PYTHON))
LOWEST_TORCH := torch==$(shell sed -n 's/^ *"torch>=\([0-9.]*\),.*/\1/p' pyproject.toml).0
LOWEST_TESTS := tests/unit/capture tests/unit/train tests/backend/test_pytorch_backend.py

.PHONY: bench test lowest install clean

bench: $(STAMP)
	$(BIN)/hetpipe bench --json out/bench.json --picture out/bench.png $(ARGS)

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal --share $(SHARE)

lowest: $(LOWEST)/installed $(STAMP)
	$(LOWEST)/bin/python -m pytest --share $(SHARE) -n 2 --dist worksteal $(LOWEST_TESTS)
	HETPIPE_OTHER_PYTHON=$(abspath $(LOWEST))/bin/python $(BIN)/python -m pytest tests/engine/test_unlike_hosts.py

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "hetpipe needs Python 3.10 or newer; try make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/pip install -q --index-url $(TORCH_INDEX) $(TORCH))
	$(BIN)/pip install -q -c constraints.txt -e '.[emulators,bench,test,docs]'
	touch $@

# No constraints.txt: its setuptools is newer than an old torch allows.
$(LOWEST)/installed: pyproject.toml
	$(LOWEST_PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(LOWEST_TORCH)
	$(LOWEST)/bin/pip install -q $(LOWEST_TORCH) -e '.[conformance,hosts]' hypothesis pytest-timeout pytest-xdist transformers
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST) build out .mypy_cache .ruff_cache .pytest_cache
