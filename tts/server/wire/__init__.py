"""Conversion between protocol messages and values."""
