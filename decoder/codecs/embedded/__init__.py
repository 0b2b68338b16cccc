"""A codec with one codebook, a transformer and inverse STFTs."""
