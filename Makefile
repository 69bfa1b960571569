# make demo   install if needed, then write a story with the embedded model
# make serve  install if needed, then serve the embedded model at http://127.0.0.1:8000
# make test   lint, types, tests on every lane that needs no hardware
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= Once upon a time
# Processes that run tests side by side (0: in one process), the lanes (all that need no hardware), and what to test.
WORKERS ?= 2
LANES ?=
TESTS ?=

DECLARED := pyproject.toml constraints.txt $(wildcard devices/*/pyproject.toml simulator/pyproject.toml) tools/install_devices.py

.PHONY: demo serve test lint clean

demo: $(VENV)/installed
	@$(BIN)/sglcore generate --prompt "$(PROMPT)"

serve: $(VENV)/installed
	@$(BIN)/sglcore serve

test: lint
	$(BIN)/python -m ci run $(LANES) --workers $(WORKERS) --tests "$(TESTS)"

lint: $(VENV)/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
	find . -name '*.egg-info' -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/pyvenv.cfg $(DECLARED)
	@$(BIN)/python tools/install_devices.py
	@touch $@

$(VENV)/installed-test: $(VENV)/pyvenv.cfg $(DECLARED)
	@$(BIN)/python tools/install_devices.py --extra test --all
	@$(BIN)/python tools/install_browser.py
	@touch $@ $(VENV)/installed
