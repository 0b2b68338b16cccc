"""Layers of models: linear, embedding, norm, rotary, activation, attention."""
