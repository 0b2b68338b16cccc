"""Low-rank adapters of a base model: their files, and the adapters of a batch."""
