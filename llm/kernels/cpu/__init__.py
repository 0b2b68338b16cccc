"""Matrix products on a CPU whose sums have one order, compiled for the processor by LLVM."""
