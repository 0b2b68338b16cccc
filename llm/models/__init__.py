"""Architectures: the `PipelineModel` interface, one file per model, and weights."""
