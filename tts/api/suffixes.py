"""Which audio format a file's suffix names. Imports nothing: `--help` lists the suffixes."""

from __future__ import annotations

SUFFIXES = {
    ".wav": "wav",
    ".flac": "flac",
    ".ogg": "opus",
    ".opus": "opus",
    ".mp3": "mp3",
    ".pcm": "s16le",
    ".raw": "s16le",
    ".s16": "s16le",
    ".f32": "f32le",
    ".ul": "mulaw",
    ".ulaw": "mulaw",
    ".al": "alaw",
    ".alaw": "alaw",
}
"""Suffix in lower case to the value of a `decoder.AudioEncoding`."""
