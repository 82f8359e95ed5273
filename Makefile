# Two commands: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test clean

.venv/installed: pyproject.toml constraints.txt scripts/install
	PYTHON=$(PYTHON) scripts/install
	touch $@

demo: .venv/installed
	scripts/demo

test: .venv/installed
	scripts/test

clean:
	rm -rf .venv runs
