"""A voice from a recording: a stranger's clip and its transcript become a voice prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from decoder import AudioFormat, AudioFormatError, PromptAudioLimits, read_prompt_audio
from tts.engine_client import EngineClient
from tts.errors import InvalidRequestError, Precondition, PreconditionError, PromptTimeoutError
from tts.prompt import PromptBuilder
from tts.text import TextOptions, split_text
from tts.voices import Voice, VoicePrompt

MAX_TRANSCRIPT_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True)
class CloningLimits:
    """What a clip may be, how long reading it may take, and what must stay free beside it.

    `max_prompt_tokens` is how much of the model's context a voice may take (None: no bound).
    """

    audio: PromptAudioLimits = field(default_factory=PromptAudioLimits)
    read_timeout_s: float = 10.0
    max_prompt_tokens: int | None = None


class VoiceCloner:
    """Makes voice prompts. Reading and encoding run on other threads."""

    def __init__(
        self, client: EngineClient, prompts: PromptBuilder, limits: CloningLimits | None = None
    ) -> None:
        self._client, self._prompts = client, prompts
        self._limits = limits or CloningLimits()

    async def from_clip(
        self, audio: bytes, audio_format: AudioFormat | None, transcript: str
    ) -> VoicePrompt:
        """Encode a clip. `audio_format` is needed for headerless samples only.

        Raises PreconditionError when the model cannot clone, InvalidRequestError for a clip or a
        transcript that cannot be used, PromptTimeoutError.
        """
        rate = self._codec_rate()
        spoken = self._spoken(transcript)
        samples = await self._read(audio, rate, audio_format)
        codes = await self._client.encode_prompt(samples)
        return self._checked(VoicePrompt(codes, spoken))

    def from_codes(self, codes: Sequence[int]) -> VoicePrompt:
        """A prompt of codes that a client made itself. RequestError for codes out of range."""
        if not codes:
            raise InvalidRequestError.of("voice.prompt_tokens", "there are no speech tokens")
        return self._checked(VoicePrompt(tuple(codes)))

    def _codec_rate(self) -> int:
        codec = self._client.codec
        if codec is None or not codec.can_encode:
            raise PreconditionError(
                Precondition.VOICE_CLONING, "this model cannot take a voice from a recording"
            )
        return codec.sample_rate

    @staticmethod
    def _spoken(transcript: str) -> str:
        """The transcript as it is read aloud, which is what the model was trained on."""
        field_name = "voice.prompt.transcript"
        if len(transcript) > MAX_TRANSCRIPT_CHARACTERS:
            raise InvalidRequestError.of(
                field_name, f"has more than {MAX_TRANSCRIPT_CHARACTERS} characters"
            )
        spoken = " ".join(segment.text for segment in split_text(transcript, TextOptions()))
        if not spoken:
            raise InvalidRequestError.of(field_name, "must say what is spoken in the clip")
        return spoken

    async def _read(self, audio: bytes, rate: int, audio_format: AudioFormat | None) -> np.ndarray:
        limits = self._limits
        reading = asyncio.to_thread(read_prompt_audio, audio, rate, audio_format, limits.audio)
        try:
            return await asyncio.wait_for(reading, limits.read_timeout_s)
        except AudioFormatError as error:
            raise InvalidRequestError.of("voice.prompt.audio", str(error)) from error
        except TimeoutError:
            raise PromptTimeoutError(
                f"reading the clip took more than {limits.read_timeout_s:g} s"
            ) from None

    def _checked(self, prompt: VoicePrompt) -> VoicePrompt:
        """The prompt, when its codes are codes and it leaves room to speak."""
        voice = Voice("prompt", prompt=prompt)
        length, most = len(self._prompts.speech_prompt("", voice)), self._limits.max_prompt_tokens
        if most is not None and length > most:
            raise InvalidRequestError.of(
                "voice.prompt",
                f"takes {length} tokens of the model's context, {most} are there; shorten the clip",
            )
        return prompt
