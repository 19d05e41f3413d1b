# make demo | make test | make report | make lint | make lock     (PYTHON=python3.12 chooses the interpreter)
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test report lint lock clean

demo: .venv/.installed  ## GC-Fed on scikit-learn's digits: 5 of 20 clients a round
	$(BIN)/python src/train.py

test: .venv/.installed  ## the whole test suite
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

report: .venv/.installed  ## tables, figures and a page of all runs below logs/
	$(BIN)/python src/report.py

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The stamp makes this idempotent: it runs again only when the lock or the project's metadata change.
.venv/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "This project needs Python 3.11, 3.12 or 3.13; $$($(PYTHON) --version) found. Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

lock: .venv/.installed  ## renew requirements.lock: names and versions only
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url --extra dev \
		--upgrade pyproject.toml --output-file requirements.lock

clean:
	rm -rf .venv
