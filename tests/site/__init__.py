"""The documentation site: ``python -m tests.site`` builds it, and prints figures of its prose."""
