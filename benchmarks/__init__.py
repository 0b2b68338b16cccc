"""Commands behind every number of the documentation: `python -m benchmarks.NAME` prints them."""
