PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The tests of the core; those of fine-tuning, benchmark and dynamics are run by their files until they fit the time.
CORE := $(patsubst %,tests/test_%.py,codecs weights parity optimizer options resume property summary plan package)

.PHONY: demo test lint clean

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch triton
	$(BIN)/pip install -q -c constraints.txt -e ".[finetune,dev]"
	touch $@

demo: $(VENV)/ready
	$(BIN)/lowbit bench --overwrite

test: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 $(CORE)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) lowbit-bench lowbit-finetune
