"""Assets that are feeds."""
