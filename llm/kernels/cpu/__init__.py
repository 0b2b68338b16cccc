"""Matrix products on a CPU with a fixed order of sums, compiled for the processor by LLVM."""
