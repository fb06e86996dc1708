"""What only tubes need: attaching, touching, backfilling, and giving up what is gone downstream."""
