"""The engine: requests in, tokens out, one loop on one thread."""
