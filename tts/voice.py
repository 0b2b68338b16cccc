"""The values of a voice: what makes a model speak like somebody."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

VOICE_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
BYTES_PER_CODE = 4


@dataclass(frozen=True, slots=True)
class VoicePrompt:
    """A reference clip: its codes, and what is said in it (normalised, may be unknown)."""

    codes: tuple[int, ...]
    transcript: str = ""


@dataclass(frozen=True, slots=True)
class VoiceClip:
    """A reference clip in a checkpoint that has not been encoded yet."""

    path: Path
    transcript: str


@dataclass(frozen=True, slots=True)
class Voice:
    """What makes a model speak like somebody: a control token of its own, a speaker's name in
    the prompt, or a prompt to imitate, which may still be a clip. None: the model's own choice.
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

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything in it that is text."""
        transcript = self.prompt.transcript if self.prompt else ""
        return (self.name, self.display_name, self.consent, *self.language_codes, transcript)

    @property
    def num_bytes(self) -> int:
        """About what keeping it costs."""
        num_codes = len(self.prompt.codes) if self.prompt else 0
        return sum(len(text.encode()) for text in self.texts) + BYTES_PER_CODE * num_codes

    def speaks(self, language_code: str) -> bool:
        """Whether the voice is for this BCP-47 language: "en" covers "en-US" and reverse."""
        asked = language_code.lower()
        return any(
            own == asked or own.startswith(asked + "-") or asked.startswith(own + "-")
            for own in map(str.lower, self.language_codes)
        )


@dataclass(frozen=True, slots=True)
class VoiceSet:
    """The voices that come with a checkpoint, and the name of the default one (empty: none)."""

    voices: tuple[Voice, ...] = ()
    default: str = ""
