# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PREFECT_SERVER_ANALYTICS_ENABLED = false
export DO_NOT_TRACK = 1

.PHONY: demo test check screenshots campaign clean

$(VENV)/.run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 14) else "Headrace needs Python 3.11 to 3.13; this is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[trainer,embedded]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[trainer,embedded,dev]'
	@touch $@

demo: $(VENV)/.run
	$(BIN)/headrace demo

# Three at a time: what needs the cluster, whose jobs wait more than they compute; what runs flows,
# which waits for servers; and the rest.
test: $(VENV)/.dev
	$(BIN)/python -m tests.prepare
	@echo "The tests that need a cluster or run flows go beside the others and are shown after them."
	@$(BIN)/python -m pytest -m 'slurm and not campaign' --durations 10 >.pytest-slurm.log 2>&1 & \
	slurm=$$!; \
	$(BIN)/python -m pytest tests/flows -m 'not slurm and not campaign' --durations 10 \
		>.pytest-flows.log 2>&1 & \
	flows=$$!; \
	$(BIN)/python -m pytest --ignore tests/flows -m 'not slurm and not campaign' --durations 10; \
	rest=$$?; \
	wait $$flows; flows=$$?; \
	wait $$slurm; slurm=$$?; \
	cat .pytest-flows.log .pytest-slurm.log; \
	exit $$((rest | flows | slurm))

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

# The pictures of the UI in the docs, taken by the tests that look at it.
screenshots: $(VENV)/.dev
	mkdir -p docs/images
	HEADRACE_SCREENSHOTS=docs/images $(BIN)/python -m pytest tests/e2e -k 'browser or cut_off'

campaign: $(VENV)/.dev
	$(BIN)/python -m tests.prepare
	$(BIN)/python -m pytest -m campaign

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
