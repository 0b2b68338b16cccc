"""Comparisons of the built-in voice with its teacher; `python -m training.evaluate` runs them."""
