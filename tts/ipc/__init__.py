"""Interprocess communication of front ends and the engine: bounded queues of frozen messages."""
