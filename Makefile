# Two commands need nothing before them: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := runs/demo
# One thread a test worker: two workers on two cores. Modules that one of the tests' processes compiles serve the others.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo test lint format docs clean

help:
	@echo "make demo    train a small model on this machine's CPU: about four minutes, install included"
	@echo "make test    install what the tests need and run them all: about 7 minutes on two cores"
	@echo "make lint    format, style, types, and the direction of imports"
	@echo "make format  write the format"
	@echo "make docs    draw the figures of the docs again"
	@echo "make clean   remove .venv and what tools left behind; runs/ stays"

$(VENV)/created:
	@echo "Making $(VENV) …"
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Trifocal needs Python 3.11 or newer, this is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.11 …")'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/installed: $(VENV)/created pyproject.toml constraints.txt
	@echo "Installing Trifocal, PyTorch and what reports need (about 30 s with a warm cache) …"
	@$(PIP) install -c constraints.txt -e '.[report]'
	@touch $@

# The test tools include what reports need, so that one installation is enough.
$(VENV)/installed-dev: $(VENV)/created pyproject.toml constraints.txt
	@echo "Installing Trifocal, PyTorch and the test tools …"
	@$(PIP) install -c constraints.txt -e '.[dev]' 'triton; sys_platform == "linux"'
	@touch $(VENV)/installed $@

demo: $(VENV)/installed
	@$(BIN)/trifocal train configs/demo.toml --run.directory $(RUN) --overwrite
	@echo && echo "These commands are in $(BIN): first type source $(BIN)/activate"

test: $(VENV)/installed-dev
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p trifocal
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/installed-dev
	$(BIN)/python docs/figures/draw.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
