# `make train` loses a device on purpose, and gets it back: FAULTS= leaves it alone.
FAULTS ?= --fault kill:device=1,step=60 --fault return:device=1,step=200

# `make train` and `make test` set up what they need first. Further flags: `make train ARGS="--set train.steps=20"`.
ARGS ?=

.PHONY: train test check clean

train: .venv/.ready
	.venv/bin/uneven train --out runs/$$(date +%Y%m%d-%H%M%S) $(FAULTS) $(ARGS)

test: .venv/.ready
	scripts/test $(ARGS)

check: .venv/.ready
	scripts/check

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready: requirements.lock requirements-demo.lock pyproject.toml
	scripts/setup
