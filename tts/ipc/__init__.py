"""The hop between front ends and the engine: frozen messages over ZeroMQ, both ways bounded."""
