"""Ranks that share one model: tensor-parallel collectives."""
