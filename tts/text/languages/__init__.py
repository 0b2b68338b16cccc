"""Readers of figures in languages other than English: one engine, one table per language."""
