"""Execution of a model on one device: weights, memory pool, attention plan, forward, sampling."""
