"""Sensors that wait for changes, or for a consumer to have processed them."""
