"""Operators that only tubes need: attach tables, touch ids, backfill, and process control pods."""
