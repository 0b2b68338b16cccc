"""Speech generation on the engine: tokens to chunks, chunks to decoded audio."""
