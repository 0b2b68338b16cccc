"""Voice cloning: encodes a clip and its transcript to a voice prompt."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from decoder import AudioFormat, AudioFormatError, PromptAudioLimits, read_prompt_audio
from tts.engine.client import EncodedClip, EngineClient
from tts.errors import InvalidRequestError, Precondition, PreconditionError, PromptTimeoutError
from tts.families.prompt import PromptBuilder
from tts.text.segmenter import TextOptions, spoken_text
from tts.voices.types import Voice, VoicePrompt

MAX_TRANSCRIPT_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True)
class CloningLimits:
    """Limits of voice prompts.

    `audio` limits clips, and `read_timeout_s` the time to read one. `max_prompt_tokens` is the
    maximum length of a voice in the model's context (None: no limit); `max_cached_codes` bounds
    the cache of encoded clips.
    """

    audio: PromptAudioLimits = field(default_factory=PromptAudioLimits)
    read_timeout_s: float = 10.0
    max_prompt_tokens: int | None = None
    max_cached_codes: int = 100_000


class PromptCache:
    """LRU cache of encoded clips, by a digest of the clip."""

    def __init__(self, max_codes: int) -> None:
        self._max_codes = max_codes
        self._num_codes = 0
        self._clips: OrderedDict[bytes, EncodedClip] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clips)

    def get(self, key: bytes) -> EncodedClip | None:
        """Return a clip and mark it as most recently used; None if not cached."""
        if key in self._clips:
            self._clips.move_to_end(key)
        return self._clips.get(key)

    def put(self, key: bytes, clip: EncodedClip) -> None:
        """Add a clip."""
        if key not in self._clips:
            self._clips[key] = clip
            self._num_codes += len(clip.codes)
        while self._num_codes > self._max_codes:
            self._num_codes -= len(self._clips.popitem(last=False)[1].codes)


def _digest(audio: bytes, audio_format: AudioFormat | None) -> bytes:
    return hashlib.blake2b(repr(audio_format).encode() + b"\0" + audio).digest()


class VoiceCloner:
    """Encoder of voice prompts. Reading and encoding run on other threads."""

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
        self._ready: dict[str, VoicePrompt] = {}  # of the checkpoint's clips, by name

    @property
    def can_clone(self) -> bool:
        """Whether the model can take a voice from a recording."""
        codec = self._client.codec
        return codec is not None and codec.can_encode and self._takes_codes

    @property
    def _takes_codes(self) -> bool:
        family = self._prompts.family
        return family is None or family.traits.takes_codes

    async def from_clip(
        self,
        audio: bytes,
        audio_format: AudioFormat | None,
        transcript: str,
        field: str = "voice.prompt",
        voice: Voice | None = None,
    ) -> VoicePrompt:
        """Encode a clip of a voice, whose languages are those of the transcript.

        `audio_format` is required for headerless samples only.

        Raises PreconditionError when the model cannot clone, PromptTimeoutError, and
        InvalidRequestError, which names fields below `field`, for an invalid clip or transcript.
        """
        rate = self._codec_rate()
        spoken = self._spoken(transcript, f"{field}.transcript", voice)
        key = _digest(audio, audio_format)
        clip = self._cache.get(key)
        if clip is None:
            try:
                clip = await self._encode(audio, rate, audio_format)
            except AudioFormatError as error:
                raise InvalidRequestError.of(f"{field}.audio", str(error)) from error
            self._cache.put(key, clip)
        codes = clip.codes if spoken or not clip.vector else ()
        return self._checked(VoicePrompt(codes, spoken, clip.vector), field)

    async def ready(self, voice: Voice) -> Voice:
        """Return the voice with its clip encoded; a clip of the checkpoint is encoded once.

        Raises the errors of `from_clip`, and PreconditionError for an invalid clip of the
        checkpoint.
        """
        clip = voice.clip
        if clip is None or voice.prompt is not None:
            return voice
        if isinstance(clip.audio, bytes):
            prompt = await self.from_clip(
                clip.audio, clip.audio_format, clip.transcript, clip.field, voice
            )
            return replace(voice, prompt=prompt, clip=None)
        if voice.name not in self._ready:
            audio = await asyncio.to_thread(clip.audio.read_bytes)
            try:
                prompt = await self.from_clip(audio, None, clip.transcript, voice=voice)
            except InvalidRequestError as error:
                raise PreconditionError(
                    Precondition.VOICE_PROMPT, f"the recording of voice '{voice.name}': {error}"
                ) from error
            self._ready[voice.name] = prompt
        return replace(voice, prompt=self._ready[voice.name], clip=None)

    def from_codes(self, codes: Sequence[int], field: str = "voice.prompt_tokens") -> VoicePrompt:
        """Return the prompt of codes that a client sends.

        Raises InvalidRequestError without codes, RequestError for codes out of range, and
        PreconditionError when the model reads none.
        """
        if not codes:
            raise InvalidRequestError.of(field, "there are no speech tokens")
        if not self._takes_codes:
            raise PreconditionError(
                Precondition.VOICE_CLONING, "this model cannot take a voice from speech tokens"
            )
        return self._checked(VoicePrompt(tuple(codes)), field)

    def _codec_rate(self) -> int:
        codec = self._client.codec
        if codec is None or not self.can_clone:
            raise PreconditionError(
                Precondition.VOICE_CLONING, "this model cannot take a voice from a recording"
            )
        return codec.sample_rate

    def _spoken(self, transcript: str, field: str, voice: Voice | None) -> str:
        """Return the normalised transcript, as in the model's training; "" if none is needed."""
        if len(transcript) > MAX_TRANSCRIPT_CHARACTERS:
            raise InvalidRequestError.of(
                field, f"has more than {MAX_TRANSCRIPT_CHARACTERS} characters"
            )
        family, options = self._prompts.family, replace(self._options, field=field)
        if family is not None and voice is not None:
            options = family.traits.text_options(None, voice, field=field)
        spoken = spoken_text(transcript, options)
        is_needed = family is None or family.traits.needs_transcript
        if is_needed and not spoken:
            raise InvalidRequestError.of(field, "must say what is spoken in the clip")
        return spoken

    async def _encode(
        self, audio: bytes, rate: int, audio_format: AudioFormat | None
    ) -> EncodedClip:
        limits = self._limits
        reading = asyncio.to_thread(read_prompt_audio, audio, rate, audio_format, limits.audio)
        try:
            samples = await asyncio.wait_for(reading, limits.read_timeout_s)
        except TimeoutError:
            raise PromptTimeoutError(
                f"reading the clip took more than {limits.read_timeout_s:g} s"
            ) from None
        clip = await self._client.encode_prompt(samples)
        vocabulary, codes = self._prompts.vocabulary, clip.codes
        if vocabulary is None:
            return clip
        return clip._replace(codes=codes[: vocabulary.whole_frames(len(codes))])

    def _checked(self, prompt: VoicePrompt, field: str) -> VoicePrompt:
        """Return the prompt; raise for invalid codes, or too many for the model's context."""
        voice = Voice("prompt", prompt=prompt)
        length, most = len(self._prompts.speech_prompt("", voice)), self._limits.max_prompt_tokens
        if most is not None and length > most:
            raise InvalidRequestError.of(
                field,
                f"takes {length} tokens of the model's context, {most} are there; shorten the clip",
            )
        return prompt
