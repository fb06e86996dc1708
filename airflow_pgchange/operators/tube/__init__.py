"""Operators that only tubes need: attach tables, touch ids, backfill, recompute reports, and process control pods."""
