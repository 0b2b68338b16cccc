"""A voice from a recording: a stranger's clip and its transcript become a voice prompt."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from decoder import AudioFormat, AudioFormatError, PromptAudioLimits, read_prompt_audio
from tts.engine_client import EngineClient
from tts.errors import InvalidRequestError, Precondition, PreconditionError, PromptTimeoutError
from tts.prompt import PromptBuilder
from tts.text import TextOptions, spoken_text
from tts.voices import Voice, VoicePrompt

MAX_TRANSCRIPT_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True)
class CloningLimits:
    """What a clip may be, how long reading it may take, and what must stay free beside it.

    `max_prompt_tokens` is how much of the model's context a voice may take (None: no bound);
    `max_cached_codes` is how many codes of clips are kept for requests that bring one again.
    """

    audio: PromptAudioLimits = field(default_factory=PromptAudioLimits)
    read_timeout_s: float = 10.0
    max_prompt_tokens: int | None = None
    max_cached_codes: int = 100_000


class PromptCache:
    """Codes of the clips that were sent last, by what was sent; the oldest go first."""

    def __init__(self, max_codes: int) -> None:
        self._max_codes = max_codes
        self._num_codes = 0
        self._codes: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._codes)

    def get(self, key: bytes) -> tuple[int, ...] | None:
        """The codes of a clip, which become the youngest."""
        if key in self._codes:
            self._codes.move_to_end(key)
        return self._codes.get(key)

    def put(self, key: bytes, codes: tuple[int, ...]) -> None:
        """Keep a clip's codes."""
        if key not in self._codes:
            self._codes[key] = codes
            self._num_codes += len(codes)
        while self._num_codes > self._max_codes:
            self._num_codes -= len(self._codes.popitem(last=False)[1])


def _digest(audio: bytes, audio_format: AudioFormat | None) -> bytes:
    return hashlib.blake2b(repr(audio_format).encode() + b"\0" + audio).digest()


class VoiceCloner:
    """Makes voice prompts. Reading and encoding run on other threads."""

    def __init__(
        self,
        client: EngineClient,
        prompts: PromptBuilder,
        limits: CloningLimits | None = None,
        options: TextOptions | None = None,
    ) -> None:
        self._client, self._prompts = client, prompts
        self._limits, self._options = limits or CloningLimits(), options or TextOptions()
        self._cache = PromptCache(self._limits.max_cached_codes)
        self._ready: dict[str, Voice] = {}  # voices of the checkpoint that were clips

    async def from_clip(
        self, audio: bytes, audio_format: AudioFormat | None, transcript: str
    ) -> VoicePrompt:
        """Encode a clip. `audio_format` is needed for headerless samples only.

        Raises PreconditionError when the model cannot clone, InvalidRequestError for a clip or a
        transcript that cannot be used, PromptTimeoutError.
        """
        rate = self._codec_rate()
        spoken = self._spoken(transcript)
        key = _digest(audio, audio_format)
        codes = self._cache.get(key)
        if codes is None:
            codes = await self._encode(audio, rate, audio_format)
            self._cache.put(key, codes)
        return self._checked(VoicePrompt(codes, spoken))

    async def ready(self, voice: Voice) -> Voice:
        """The same voice with its prompt: a clip of the checkpoint is encoded once, when it is
        first asked for. PreconditionError when it cannot be used.
        """
        clip = voice.clip
        if clip is None or voice.prompt is not None:
            return voice
        if voice.name not in self._ready:
            audio = await asyncio.to_thread(clip.path.read_bytes)
            try:
                prompt = await self.from_clip(audio, None, clip.transcript)
            except InvalidRequestError as error:
                raise PreconditionError(
                    Precondition.VOICE_PROMPT, f"the recording of voice '{voice.name}': {error}"
                ) from error
            self._ready[voice.name] = replace(voice, prompt=prompt, clip=None)
        return self._ready[voice.name]

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

    def _spoken(self, transcript: str) -> str:
        """The transcript as it is read aloud, which is what the model was trained on."""
        field_name = "voice.prompt.transcript"
        if len(transcript) > MAX_TRANSCRIPT_CHARACTERS:
            raise InvalidRequestError.of(
                field_name, f"has more than {MAX_TRANSCRIPT_CHARACTERS} characters"
            )
        spoken = spoken_text(transcript, self._options)
        if not spoken:
            raise InvalidRequestError.of(field_name, "must say what is spoken in the clip")
        return spoken

    async def _encode(
        self, audio: bytes, rate: int, audio_format: AudioFormat | None
    ) -> tuple[int, ...]:
        samples = await self._samples(audio, rate, audio_format)
        codes = await self._client.encode_prompt(samples)
        vocabulary = self._prompts.vocabulary
        return codes[: vocabulary.whole_frames(len(codes))] if vocabulary else codes

    async def _samples(
        self, audio: bytes, rate: int, audio_format: AudioFormat | None
    ) -> np.ndarray:
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
