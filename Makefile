# `make demo` and `make test` are all that a newcomer needs. Each target sets up .venv first.
PYTHON ?= python3

.PHONY: demo test test-slow docs clean

.venv/installed: pyproject.toml constraints.txt scripts/install
	PYTHON=$(PYTHON) scripts/install
	touch $@

demo: .venv/installed
	scripts/demo

test: .venv/installed
	scripts/test

test-slow: .venv/installed
	scripts/test_slow

docs: .venv/installed
	scripts/docs

clean:
	rm -rf .venv runs build
