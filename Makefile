# Everything that a newcomer or CI needs; each target sets up what it lacks.

PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest
SETUP := scripts/bootstrap pyproject.toml constraints.txt

.PHONY: demo test lint bench chaos mutants clean

demo: .venv/demo-ready
	@$(PYTHON) -m demo

test: .venv/test-ready
	$(PYTEST) tests/unit tests/integration -n 2 --dist worksteal
	$(PYTEST) tests/integration -n 2 --dist worksteal --server embedded --ignore-glob "*/test_airflow_*" --ignore-glob "*/test_spark_*" --ignore-glob "*queue*" --ignore-glob "*saga*"
	$(PYTEST) tests/system
	$(PYTEST) tests/chaos
	$(PYTEST) tests/chaos/test_exactly_once.py tests/chaos/test_servers.py tests/chaos/test_mirror.py tests/chaos/test_events.py --server embedded

lint: .venv/test-ready
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

bench: .venv/test-ready
	$(PYTHON) -m tests.benchmarks

chaos: .venv/test-ready
	CHAOS=full $(PYTEST) tests/chaos --timeout 7200

mutants: .venv/test-ready
	$(PYTHON) -m tests.suite.mutants

clean:
	rm -rf .venv .mypy_cache .ruff_cache spark-warehouse

.venv/demo-ready: $(SETUP)
	@scripts/bootstrap demo
	@touch $@

.venv/test-ready: $(SETUP)
	@scripts/bootstrap test
	@touch $@
