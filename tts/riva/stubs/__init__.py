"""Generated from proto/nvidia/riva by `make proto`; never edited by hand."""
