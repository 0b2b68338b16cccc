"""Values that define a voice: how a model imitates one speaker."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from decoder import AudioFormat
from tts.text.lexicon.entries import Pronunciation

VOICE_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
BYTES_PER_CODE = 4


@dataclass(frozen=True, slots=True)
class VoicePrompt:
    """Encoded reference clip: its codes, its normalised transcript ("" if unknown), and the vector
    of its speaker (b"" if the model reads none), which may be alone.
    """

    codes: tuple[int, ...]
    transcript: str = ""
    vector: bytes = b""


@dataclass(frozen=True, slots=True)
class VoiceClip:
    """Reference clip that is not encoded yet: a file of the checkpoint, or bytes of a request.

    `audio_format` is needed for headerless samples only; `field` is the clip's field path in its
    request, which errors name.
    """

    audio: Path | bytes
    transcript: str
    audio_format: AudioFormat | None = None
    field: str = "voice.prompt"


@dataclass(frozen=True, slots=True)
class Voice:
    """Voice of one speaker: a control token, a speaker's name in the prompt, or a voice prompt,
    which may still be a clip. With none of these the model chooses the speaker.
    """

    name: str
    display_name: str = ""
    language_codes: tuple[str, ...] = ()
    control_token: str = ""
    speaker: str = ""
    prompt: VoicePrompt | None = None
    clip: VoiceClip | None = None
    is_builtin: bool = False
    consent: str = ""  # what the creator stated about the speaker's agreement
    codec: str = ""  # identity of the codec that a created voice's codes are of
    pronunciations: tuple[Pronunciation, ...] = ()  # of all texts in this voice
    language: str = ""  # BCP-47 code of the text that a request has for the voice; "": not stated
    instructions: str = ""  # style in words, of a request

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the voice."""
        transcript = self.prompt.transcript if self.prompt else ""
        said = (text for entry in self.pronunciations for text in (entry.phrase, entry.spoken))
        own = (self.name, self.display_name, self.consent, *self.language_codes, transcript)
        return (*own, *said)

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        prompt = self.prompt or VoicePrompt(())
        size = BYTES_PER_CODE * len(prompt.codes) + len(prompt.vector)
        return sum(len(text.encode()) for text in self.texts) + size

    def speaks(self, language_code: str) -> bool:
        """Return whether the voice is for a BCP-47 language; "en" and "en-US" match."""
        asked = language_code.lower()
        return any(
            own == asked or own.startswith(asked + "-") or asked.startswith(own + "-")
            for own in map(str.lower, self.language_codes)
        )


@dataclass(frozen=True, slots=True)
class VoiceSet:
    """Voices of a checkpoint, and the name of the default one ("": none)."""

    voices: tuple[Voice, ...] = ()
    default: str = ""
