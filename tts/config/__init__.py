"""Configuration of the service: fields, sources of values, and defaults of a checkpoint."""
