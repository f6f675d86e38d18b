PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch triton
	$(BIN)/pip install -q -c constraints.txt -e ".[finetune,dev]"
	touch $@

demo: $(VENV)/ready
	$(BIN)/lowbit bench --overwrite

test: $(VENV)/ready
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) lowbit-bench lowbit-finetune
