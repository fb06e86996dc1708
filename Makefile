# Everything that a newcomer or CI needs; each target sets up what it lacks.

PYTHON := .venv/bin/python
# uv by itself trusts only the certificates that it brings.
CERTIFICATES := SSL_CERT_FILE=$${SSL_CERT_FILE:-$(wildcard /etc/ssl/certs/ca-certificates.crt)}
SETUP := scripts/bootstrap pyproject.toml constraints.txt

.PHONY: demo check test install-test release-test dist docs matrix oldest lint bench mutants clean

demo: .venv/demo-ready
	@$(PYTHON) -m demo

check: .venv/test-ready
	@$(PYTHON) -m tests.suite.check $(if $(FEED),--feed $(FEED))

test: .venv/test-ready
	@$(PYTHON) -m tests.suite.run $(if $(OTHER),--servers other) $(if $(RECORD),--record $(filter tests/%,$(RECORD)))

install-test: .venv/test-ready
	$(PYTHON) -m pytest -q --release tests/system/test_install.py tests/system/test_demo.py

release-test: .venv/test-ready
	@$(PYTHON) -m tests.suite.release

dist: .venv/test-ready
	rm -rf dist
	$(PYTHON) -m build --no-isolation --outdir dist .
	$(CERTIFICATES) .venv/bin/uv tool run twine check --strict dist/*
	PGCHANGE_DIST=dist $(PYTHON) -m pytest -q --release tests/system/test_install.py -k quick_start

docs: .venv/docs-ready
	@$(PYTHON) -m tests.site

matrix: .venv/test-ready
	@$(PYTHON) -m tests.matrix $(CELL)

oldest: .venv/test-ready
	@$(PYTHON) -m tests.matrix --oldest

lint: .venv/test-ready
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m tests.prose --lint

bench: .venv/test-ready
	$(PYTHON) -m tests.benchmarks

mutants: .venv/test-ready
	@$(PYTHON) -m tests.suite.mutants

clean:
	rm -rf .venv .cache dist .mypy_cache .ruff_cache spark-warehouse

.venv/demo-ready: $(SETUP)
	@scripts/bootstrap demo
	@touch $@

.venv/docs-ready: $(SETUP)
	@scripts/bootstrap docs
	@touch $@

.venv/test-ready: $(SETUP)
	@scripts/bootstrap test
	@touch $@
