"""The X-Codec 2 codec."""
