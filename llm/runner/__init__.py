"""One device: weights loaded, pool allocated, attention planned, forward, sample."""
