"""Kept releases, and the tests' tools for upgrades from them. ``python -m tests.releases`` lists its commands."""
