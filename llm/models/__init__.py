"""Architectures: the `PipelineModel` interface, one file for each model, and their weights."""
