# make help lists what there is; PYTHON=python3.12 chooses the interpreter.
# make demo TORCH=cpu TORCH_INDEX=<address>: torch without CUDA's libraries, from an index that has it
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode

# What is there stays as it is: another interpreter needs another .venv.
ifneq ($(and $(wildcard $(BIN)/python),$(filter-out file,$(origin PYTHON)),$(if $(filter clean,$(MAKECMDGOALS)),,x)),)
version = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ifneq ($(filter-out $(call version,$(BIN)/python),$(call version,$(PYTHON))),)
$(error .venv has Python $(call version,$(BIN)/python), and PYTHON=$(PYTHON) is $(call version,$(PYTHON)): make clean, then again)
endif
endif

.PHONY: demo test federation test-federation mutants report docs lint lock clean help

demo: .venv/.installed  ## GC-Fed on scikit-learn's digits: 5 of 20 clients a round
	$(BIN)/python src/train.py

# The tests' processes read each other's bytecode, even where PYTHONDONTWRITEBYTECODE is set.
test: .venv/.installed  ## the whole test suite
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

federation: .venv-nvflare/.installed  ## the demo by a server and five sites of NVIDIA FLARE's on this machine
	.venv-nvflare/bin/python src/train.py federation=nvflare

test-federation: .venv-nvflare/.installed  ## real sites: the simulation's bits, faults, certificates, sockets
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv-nvflare/bin/python -m pytest tests/gcfed_sites/test_real_sites.py

SEED ?= 1
N ?= 200
mutants: .venv/.installed  ## a random sample of changes to the source: which of them does no test notice?
	$(INSTALL) --editable '.[mutants]'
	$(BIN)/python tests/mutants.py $(SEED) $(N)

report: .venv/.installed  ## tables, figures and a page of all runs below logs/
	$(BIN)/python src/report.py

docs: .venv/.installed  ## the pages as a site, in site/, with a card a method, the keys of configs/ and the Python API; a broken link is an error
	$(INSTALL) --editable '.[docs]'
	$(BIN)/python docs/build.py
	$(BIN)/zensical build --clean --strict --config-file .site.toml

lint: .venv/.installed  ## formatting, common mistakes and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --untyped-calls-exclude torch --follow-imports silent src/gcfed/federated

# The stamps make this idempotent: the packages come again only when the lock changes. Their hashes are checked; those of
# the lock are of the wheels with CUDA.
.venv/.locked: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "This project needs Python 3.11, 3.12 or 3.13; $$($(PYTHON) --version) found. Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
ifeq ($(TORCH),cpu)
	@$(INSTALL) --no-deps $(if $(TORCH_INDEX),--default-index $(TORCH_INDEX)) $$(sed -nE 's/^(torch|torchvision)==([^ ]+).*/\1==\2+cpu/p' $<) || \
		{ echo "torch for CPUs could not be installed: set TORCH_INDEX to an index that has it, or leave TORCH=cpu out (7 GB)"; exit 1; }
	awk '/^[^ ]/ { skip = /^(torch|torchvision|nvidia|cuda|triton)/ } !skip' $< > .venv/cpu.txt
	$(INSTALL) -r .venv/cpu.txt
else
	$(INSTALL) -r $<
endif
	@touch $@

.venv/.installed: .venv/.locked pyproject.toml
	$(INSTALL) --no-deps --editable .
	@touch $@

# NVFlare's own packages, in an environment that sees all of .venv's.
.venv-nvflare/.installed: .venv/.installed requirements-nvflare.lock
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-nvflare
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir({!r})".format(sysconfig.get_path("purelib")))' \
		> $$(.venv-nvflare/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gcfed_venv.pth
	$(BIN)/uv pip install --quiet --python .venv-nvflare/bin/python --compile-bytecode --no-deps -r requirements-nvflare.lock
	@touch $@

lock: .venv/.installed  ## renew requirements.lock: names, versions and hashes
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url --generate-hashes --extra dev \
		--upgrade pyproject.toml --output-file requirements.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url --generate-hashes --extra dev \
		--extra nvflare --constraint requirements.lock pyproject.toml --output-file .venv/nvflare.lock
	awk '/^[^ ]/ { name = $$1 } FNR == NR { known[name] = 1; next } !(name in known)' requirements.lock .venv/nvflare.lock > requirements-nvflare.lock

clean:  ## remove .venv, to begin again
	rm -rf .venv .venv-nvflare

help:  ## what there is to make
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16
