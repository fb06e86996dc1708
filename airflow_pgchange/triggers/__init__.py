"""Triggers that notice changes and progress, over one shared connection a database."""
