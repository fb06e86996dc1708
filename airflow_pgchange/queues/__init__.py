"""Feeds as what waits for messages of any broker knows them."""
