"""Codec of Qwen3-TTS at 12.5 frames a second."""
