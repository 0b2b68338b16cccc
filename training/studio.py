"""The two speakers that evaluation compares: the service with a checkpoint, and the teacher."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import soundfile
import torch
from safetensors.torch import load_file

from decoder.codecs.embedded.modules import CodecConfig, EmbeddedCodec
from llm import FinishReason
from training.teacher import SAMPLE_RATE, Teacher, Utterance
from training.voices import NAMED
from training.voices import Voice as Variant
from tts.config.defaults import default_values
from tts.config.pipeline import AudioGenerationConfig, load_config
from tts.factory import Service, create_service
from tts.speech.cloning import VoiceCloner
from tts.speech.types import SamplingOverrides, SpeechRequest
from tts.voices.types import Voice

T = TypeVar("T")


AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Take:
    """Mono float32 samples at 16 kHz, whether generation reached its limit, and the first samples
    of all segments but the first.
    """

    samples: np.ndarray
    ran_away: bool = False
    joins: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        return len(self.samples) / SAMPLE_RATE


class Studio:
    """Generates speech with the whole service in process, several texts at once."""

    def __init__(self, model: str | Path = "") -> None:
        config = load_config(AudioGenerationConfig, {}, base=default_values(model))
        self.service: Service = create_service(config)
        if self.service.synthesizer is None:
            raise SystemExit("this model cannot speak")
        self._synthesizer = self.service.synthesizer
        self._cloner = VoiceCloner(self.service.client, self.service.prompts)
        self._loop = asyncio.new_event_loop()
        self._room = asyncio.Semaphore(AT_ONCE)

    def run(self, work: Coroutine[object, object, T]) -> T:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.service.client.close())
        self._loop.close()

    def named(self, name: str) -> Voice:
        """Return a shipped voice."""
        index = [voice.name for voice in NAMED].index(name)
        return Voice(name, control_token=f"<|voice_{index}|>")

    def following(self, clip: Utterance, text: str) -> Voice:
        """Return a voice from a clip and its text."""
        buffer = io.BytesIO()
        soundfile.write(buffer, clip.samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
        prompt = self.run(self._cloner.from_clip(buffer.getvalue(), None, text))
        return Voice("clip", prompt=prompt)

    def speak(self, texts: Sequence[str], voice: Voice, seed: int) -> list[Take]:
        """Generate all texts in one voice."""
        return self.speak_each([(text, voice, seed) for text in texts])

    def speak_each(self, lines: Sequence[tuple[str, Voice, int]]) -> list[Take]:
        """Generate text, voice and seed each, with a constant number of active requests."""

        async def together() -> list[Take]:
            return list(await asyncio.gather(*(self._take(*line) for line in lines)))

        return self.run(together())

    async def _take(self, text: str, voice: Voice, seed: int) -> Take:
        request = SpeechRequest(text=text, voice=voice, sampling=SamplingOverrides(seed=seed))
        async with self._room:
            spoken = await self._synthesizer.synthesize(request)
        samples = np.frombuffer(spoken.audio, "<i2").astype(np.float32) / 32768
        joins = tuple(
            after.sample_offset
            for before, after in pairwise(spoken.chunks)
            if after.segment_index != before.segment_index
        )
        return Take(samples, spoken.result.finish_reason is FinishReason.LENGTH, joins)


class CodecAlone:
    """The codec as in the service, without streaming."""

    def __init__(self, weights: Path) -> None:
        self._codec = EmbeddedCodec(CodecConfig())
        self._codec.load_state_dict({k: v.float() for k, v in load_file(weights).items()})
        self._codec.eval()

    @torch.no_grad()
    def render(self, take: Take) -> Take:
        """Encode and decode a take, padded to whole codes."""
        samples = take.samples.astype(np.float32)
        padded = np.pad(samples, (0, -len(samples) % self._codec.config.hop))
        _, codes = self._codec.encode(torch.from_numpy(padded)[None])
        return Take(self._codec.decode(codes)[0].numpy())


def in_groups(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Iterate over groups of the size that is generated at once."""
    return (items[i : i + AT_ONCE] for i in range(0, len(items), AT_ONCE))


def teach(teacher: Teacher, text: str, voice: Variant) -> Take:
    """Return the teacher's speech, with level and lead as in training."""
    spoken = teacher.speak(text, voice)
    if spoken is None:
        return Take(np.zeros(0, np.float32))
    return Take(spoken.samples.astype(np.float32) / 32768)
