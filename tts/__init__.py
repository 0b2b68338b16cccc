"""The speech and text generation service."""

__version__ = "0.1.0"
