"""Operators that process batches and look after the schemas."""
