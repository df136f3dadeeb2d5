# Two commands from a fresh clone: `make demo` and `make test`. `make help` lists the rest.
# PYTHON=python3.12 picks the interpreter of .venv (3.11 or newer); the default is the first one found.

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup model node-packages demo test check format reference matrix mutants

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) model ## system packages, .venv, dependencies, the default model

$(READY): pyproject.toml constraints.txt tools/setup.sh tools/system_packages.sh
	@PYTHON="$(PYTHON)" tools/setup.sh
	@$(BIN)/lastbatch build >&2

model: $(READY) ## the default model, downloaded and converted once into the user's cache
	@$(BIN)/lastbatch model fetch > /dev/null

node-packages: ## what the tests on real systemd nodes need (systemd, ssh, ip)
	@tools/system_packages.sh nodes || true  # those tests are skipped, with the reason, where it is missing

demo: setup ## the incident, from wedge to verified fix, on this machine
	@$(BIN)/opsctl demo

test: setup node-packages ## the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

check: $(READY) ## format, lint, types, import floors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

reference: $(READY) ## docs/REFERENCE.md, from the code
	$(BIN)/opsctl reference > docs/.REFERENCE.new
	mv docs/.REFERENCE.new docs/REFERENCE.md

# Slow targets, each with its own table.

matrix: setup ## equal greedy text in every combination of modes
	$(BIN)/python -m tests.slow.matrix $(ARGS)

mutants: setup ## take each guard out of a copy: a test must notice
	$(BIN)/python tools/mutants.py $(ARGS)

bench: setup ## how fast it serves, beside transformers' generate in the same run
	@$(BIN)/python -m tests.slow.bench $(ARGS)

eval: setup ## the server's log-probabilities and answers against transformers'
	@$(BIN)/python -m tests.slow.eval $(ARGS)

soak-monitor: $(READY) ## simulated hours of healthy servers through the judge: no page; wedges: all found
	@$(BIN)/python -m tests.slow.soak_monitor $(ARGS)

prove-monitor: setup node-packages ## every fault on two real systemd nodes: declared, captured over ssh, classified
	@$(BIN)/python -m tests.slow.prove_monitor $(ARGS)

kill-captures: $(READY) ## 200 captures killed at random moments: each leaves a valid bundle
	@KILL_RUNS=200 $(BIN)/python -m pytest -q tests/monitors/test_capture_kill.py $(ARGS)

.PHONY: bench eval soak-monitor prove-monitor kill-captures

# The recorded cases: those beside the checkout where they are, else the tests' own.
CASES := $(if $(wildcard ../shared/cases),../shared/cases,tests/monitors/cases)

.PHONY: cases
cases: $(READY) ## verdicts on recorded cases against what is expected, precision and recall by class
	@$(BIN)/hang-monitor replay --all $(CASES) $(ARGS)

.PHONY: fuzz
fuzz: $(READY) ## 10,000 mutated log lines, metrics pages, stacks and case folders: no exception
	@FUZZ_ROUNDS=10000 $(BIN)/python -m pytest -q tests/monitors/test_any_input.py $(ARGS)

.PHONY: prove-rollout
prove-rollout: $(READY) node-packages ## what can go wrong with a rollout, each for real on two systemd nodes
	@$(BIN)/python -m tests.slow.prove_rollout $(ARGS)
	@[ -n "$(ARGS)" ] || $(BIN)/python -m pytest -q -m slow tests/e2e/test_rollout_nodes.py tests/e2e/test_rollout_engine.py \
	  tests/opsctl/test_unit_file_contract.py tests/opsctl/test_unit_file_cuts.py

.PHONY: drills
drills: setup ## every drill in auto mode, with the scoreboard (docs/results/drills.md)
	@$(BIN)/opsctl drill run --all $(ARGS); code=$$?; $(BIN)/opsctl drill score --report docs/results/drills.md > /dev/null; exit $$code
	$(BIN)/python -m pytest -q -m slow tests/e2e/test_drills.py

.PHONY: replay
replay: setup node-packages ## the incident of 27 September whole, on two systemd nodes: that day's figures beside ours
	@$(BIN)/opsctl drill run incident-2026-09-27 $(ARGS)
