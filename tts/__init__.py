"""The speech and text generation service.

    from tts import load

    with load() as voice:
        voice.say("Good morning.").save("morning.wav")

The public names are imported on first use, which keeps the import of the package fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tts.api.audio import Speech, SpeechPart
    from tts.api.load import load
    from tts.api.request import SpeechOptions
    from tts.api.voice import LoadedVoice
    from tts.config.pipeline import AudioGenerationConfig, PrometheusMetricsMode
    from tts.errors import (
        InvalidRequestError,
        NotFoundError,
        PreconditionError,
        SynthesisError,
        TTSError,
        VoiceNotFoundError,
    )
    from tts.speech.types import MarkTime, SegmentTime, WordTime
    from tts.text.markup.document import MarkKind

__version__ = "0.1.0"

__all__ = [
    "AudioGenerationConfig",
    "InvalidRequestError",
    "LoadedVoice",
    "MarkKind",
    "MarkTime",
    "NotFoundError",
    "PreconditionError",
    "PrometheusMetricsMode",
    "SegmentTime",
    "Speech",
    "SpeechOptions",
    "SpeechPart",
    "SynthesisError",
    "TTSError",
    "VoiceNotFoundError",
    "WordTime",
    "load",
]

_HOMES = {
    "tts.api.audio": ("Speech", "SpeechPart"),
    "tts.api.load": ("load",),
    "tts.api.request": ("SpeechOptions",),
    "tts.api.voice": ("LoadedVoice",),
    "tts.config.pipeline": ("AudioGenerationConfig", "PrometheusMetricsMode"),
    "tts.errors": (
        "InvalidRequestError",
        "NotFoundError",
        "PreconditionError",
        "SynthesisError",
        "TTSError",
        "VoiceNotFoundError",
    ),
    "tts.speech.types": ("MarkTime", "SegmentTime", "WordTime"),
    "tts.text.markup.document": ("MarkKind",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
