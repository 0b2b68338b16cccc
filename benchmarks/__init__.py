"""What produced every number in the README: `python -m benchmarks.NAME`, a table and JSON."""
