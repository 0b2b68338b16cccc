"""One step for one scheduled batch."""
