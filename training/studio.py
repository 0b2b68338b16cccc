"""Both speakers that evaluation compares: the service with a checkpoint, and the teacher."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import soundfile

from llm import FinishReason
from training.teacher import SAMPLE_RATE, Teacher, Utterance
from training.voices import NAMED
from training.voices import Voice as Variant
from tts.cloning import VoiceCloner
from tts.config import AudioGenerationConfig, load_config
from tts.factory import Service, create_service, default_values
from tts.speech import SamplingOverrides, SpeechRequest
from tts.voices import Voice

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Take:
    """Mono float32 samples at 16 kHz, and whether the service ran into its limit."""

    samples: np.ndarray
    ran_away: bool = False

    @property
    def seconds(self) -> float:
        return len(self.samples) / SAMPLE_RATE


class Studio:
    """Speaks with the whole service in process, one text at a time or several at once."""

    def __init__(self, model: str | Path = "") -> None:
        config = load_config(AudioGenerationConfig, {}, base=default_values(model))
        self.service: Service = create_service(config)
        if self.service.synthesizer is None:
            raise SystemExit("this model cannot speak")
        self._synthesizer = self.service.synthesizer
        self._cloner = VoiceCloner(self.service.client, self.service.prompts)
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[object, object, T]) -> T:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.service.client.close())
        self._loop.close()

    def named(self, name: str) -> Voice:
        """A shipped voice."""
        index = [voice.name for voice in NAMED].index(name)
        return Voice(name, control_token=f"<|voice_{index}|>")

    def following(self, clip: Utterance, text: str) -> Voice:
        """A voice from a clip and what is said in it."""
        buffer = io.BytesIO()
        soundfile.write(buffer, clip.samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
        prompt = self.run(self._cloner.from_clip(buffer.getvalue(), None, text))
        return Voice("clip", prompt=prompt)

    def speak(self, texts: list[str], voice: Voice, seed: int) -> list[Take]:
        """All texts at once."""

        async def together() -> list[Take]:
            return list(await asyncio.gather(*(self._take(t, voice, seed) for t in texts)))

        return self.run(together())

    async def _take(self, text: str, voice: Voice, seed: int) -> Take:
        request = SpeechRequest(text=text, voice=voice, sampling=SamplingOverrides(seed=seed))
        spoken = await self._synthesizer.synthesize(request)
        samples = np.frombuffer(spoken.audio, "<i2").astype(np.float32) / 32768
        return Take(samples, spoken.result.finish_reason is FinishReason.LENGTH)


def teach(teacher: Teacher, text: str, voice: Variant) -> Take:
    """The teacher's own speech, level and lead as in training."""
    spoken = teacher.speak(text, voice)
    if spoken is None:
        return Take(np.zeros(0, np.float32))
    return Take(spoken.samples.astype(np.float32) / 32768)
