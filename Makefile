# make demo   install if needed, then write a story with the embedded model
# make serve  install if needed, then serve the embedded model at http://127.0.0.1:8000
# make test   lint, types, tests on every lane that needs no hardware: the cheap ones, and slow ones by turns (docs/testing.md)
# make test-all  the same with all slow ones, which records what each test costs and which code it runs
# make near   the tests nearest to what has changed, in less than a minute; make near FILES="sglcore/schedule/scheduler.py"
# make mutation  a sample of planted defects, and which of them no test caught (docs/testing.md)
# make bench-cpu  this processor's speed beside other engines: installs those it can, and says why not the others
# make wheels  source distributions and wheels of all packages below dist/, checked (tools/wheels)
# make bench-gpu  what this accelerator does, as shares of its bounds, in ten minutes (docs/devices.md)
PYTHON ?= python3
# Further options of the installer, such as --device cuda, where what it sees is not what is meant (tools/install_devices.py).
INSTALL ?=
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= Once upon a time
# Processes that run tests side by side (0: in one process), the lanes (all that need no hardware), and what to test.
WORKERS ?= 2
LANES ?=
TESTS ?=
# Parts of the slow tests that are taken at once; and the memory of the type checker in MB: with less it forgets and begins anew.
TURNS ?= 1
TYPES_MEMORY ?= 6144
# Of near: files of the checkout; none: what has changed since the last commit.
FILES ?=
# Further options of bench-cpu, such as --quick or --engines sglcore,llama_cpp; of bench-gpu, such as --part products.
BENCH ?=
# Further options of mutation, such as --again or --file sglcore/step/emitting_rows.py.
MUTATION ?=

DECLARED := pyproject.toml $(wildcard constraints*.txt devices/*/pyproject.toml simulator/pyproject.toml) \
  tools/install_devices.py $(wildcard tools/installer/*.py)

# A Python that was asked for by name; the one that happens to be the first may differ from the environment's.
ASKED := $(if $(filter command environment,$(firstword $(origin PYTHON))),$(PYTHON))
# An environment that was left half made, or whose interpreter is gone or not the one asked for, is not there.
ifneq ($(shell $(BIN)/python tools/make_environment.py --works $(ASKED) 2>/dev/null),yes)
.PHONY: $(VENV)/pyvenv.cfg
endif

.PHONY: demo serve test test-all near lint style mutation bench-cpu bench-gpu wheels clean

demo: $(VENV)/installed
	@$(BIN)/sglcore generate --prompt "$(PROMPT)"

serve: $(VENV)/installed
	@$(BIN)/sglcore serve

CHECK_TYPES := NODE_OPTIONS=--max-old-space-size=$(TYPES_MEMORY) $(BIN)/pyright

test: style
	$(call run-lanes,)

test-all: style
	$(call run-lanes,--whole)

# Types are checked beside the lanes, which need a core each for longer; what is wrong with them is said at the end.
define run-lanes
@mkdir -p build
@$(CHECK_TYPES) > build/types.txt 2>&1 & types=$$!; \
$(BIN)/python -m ci run $(LANES) --workers $(WORKERS) --turns $(TURNS) --tests "$(TESTS)" $(1); status=$$?; \
wait $$types || { echo "RED: types"; status=1; }; cat build/types.txt; exit $$status
endef

near: $(VENV)/installed-test
	@$(BIN)/python -m ci near $(FILES)

lint: style
	$(CHECK_TYPES)

style: $(VENV)/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

mutation: build/mutation/tool/installed
	$(BIN)/python tools/mutation.py $(MUTATION)

bench-cpu: $(VENV)/installed-test
	$(BIN)/python -m benchmarks.peers.install
	$(BIN)/python benchmarks/cpu_peers.py --json build/bench/cpu_peers.json --png build/bench/cpu_peers.png $(BENCH)

bench-gpu: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt pytest transformers
	$(BIN)/python benchmarks/gpu.py --json build/bench/gpu.json $(BENCH)

wheels:
	@$(PYTHON) -m tools.wheels build

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
	find . -name '*.egg-info' -prune -exec rm -rf {} +

# Beside the tests' environment, not in it: nothing of the tool is there when tests run otherwise.
build/mutation/tool/installed: $(VENV)/installed-test constraints.txt
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --target $(@D) -c constraints.txt cosmic-ray coverage
	@touch $@

$(VENV)/pyvenv.cfg:
	@$(PYTHON) tools/make_environment.py $(if $(ASKED),--same) $(VENV)

$(VENV)/installed: $(VENV)/pyvenv.cfg $(DECLARED)
	@$(BIN)/python tools/install_devices.py $(INSTALL)
	@touch $@

$(VENV)/installed-test: $(VENV)/pyvenv.cfg $(DECLARED)
	@{ $(BIN)/python tools/install_browser.py; $(BIN)/python tools/install_compilers.py; } & \
	  SGLCORE_CPU_BUILD=all $(BIN)/python tools/install_devices.py --extra test --all $(INSTALL) && wait $$!
	@$(BIN)/python tools/install_linters.py
	@touch $@ $(VENV)/installed
