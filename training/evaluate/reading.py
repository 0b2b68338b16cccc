"""Phones and pitch that are in codes, by what read them in training
(`training.speech_codec.train_coder`).

Codes are all that the language model writes, so this judges it, and not the decoder after it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from decoder import CodecSpec
from decoder.codecs.source_filter.modules import FiniteScalarQuantizer
from llm import Request, TokenChunk
from training.kokoro.vocoder import SAMPLE_RATE
from training.speech_codec.coder import Reader, Sizes
from training.speech_codec.plans import MIDDLE_HZ, POINT
from tts.api.load import load_service
from tts.api.running import RunningService
from tts.api.voice import LoadedVoice
from tts.engine.client import AudioBlock, EncodedClip, EngineClient, SpeechJob
from tts.observe.engine_status import EngineStatus
from tts.speech.synthesizer import Synthesizer

MARKS = frozenset("ˈˌː .,;:!?—…“”\"()'")
"""Symbols that are no phones."""
SHORTEST = 2  # points of 10 ms: a symbol of the teacher has 25 ms
POINT_S = POINT / SAMPLE_RATE


def phones_of(phonemes: str) -> str:
    """Return the phones of symbols; equal neighbours are one, as they sound."""
    bare = [symbol for symbol in phonemes if symbol not in MARKS]
    pairs = zip(bare, ["", *bare], strict=False)
    return "".join(symbol for symbol, before in pairs if symbol != before)


class PhoneReader:
    """Reads the phones of codes."""

    def __init__(self, reader: Reader, known: dict[str, int]) -> None:
        """`known`: the teacher's symbols and their ids."""
        self._reader = reader.eval()
        self._values = FiniteScalarQuantizer(reader.sizes.levels)
        self._symbols = {number: symbol for symbol, number in known.items()}

    @classmethod
    def load(cls, path: Path, sizes: Sizes, known: dict[str, int]) -> PhoneReader:
        """Load the file reader.safetensors of a training, of any width."""
        state = {name: value.float() for name, value in load_file(path).items()}
        reader = Reader(sizes._replace(reader=len(state["input.weight"]) // 2))
        reader.load_state_dict(state)
        return cls(reader, known)

    @torch.inference_mode()
    def phones(self, codes: Sequence[int]) -> str:
        """Return the phones of codes [T]."""
        if not codes:
            return ""
        logits, _ = self._reader.plan(self._values.values(torch.tensor([codes])))
        read = logits[0].argmax(-1).numpy()
        starts = np.flatnonzero(np.diff(read, prepend=-1))
        long = np.diff(starts, append=len(read)) >= SHORTEST
        return phones_of("".join(self._symbols.get(n, "") for n in read[starts[long]].tolist()))

    @torch.inference_mode()
    def pitch(self, codes: Sequence[int]) -> np.ndarray:
        """Return the pitch of codes [T] in Hz, one value in every `POINT_S`, 0 without voice."""
        if not codes:
            return np.zeros(0)
        _, curves = self._reader.plan(self._values.values(torch.tensor([codes])))
        octaves, voiced, _ = curves[0].unbind(-1)
        return torch.where(voiced > 0, MIDDLE_HZ * 2**octaves, 0.0).double().numpy()


class CodeClient:
    """An engine's client that keeps the codes of what is spoken."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._codes: list[int] = []
        self.prompt: tuple[int, ...] = ()
        """The voice's codes of the last job."""

    @property
    def codec(self) -> CodecSpec | None:
        return self._client.codec

    def generate(self, request: Request) -> AsyncGenerator[TokenChunk, None]:
        """Stream a text request."""
        return self._client.generate(request)

    async def speak(self, job: SpeechJob) -> AsyncGenerator[AudioBlock, None]:
        """Stream a speech job."""
        self.prompt = job.prompt_codes
        async with aclosing(self._client.speak(job)) as blocks:
            async for block in blocks:
                self._codes += block.codes
                yield block

    async def encode_prompt(self, samples: np.ndarray) -> EncodedClip:
        """Encode a reference clip."""
        return await self._client.encode_prompt(samples)

    async def status(self) -> EngineStatus:
        """Return the engine's status."""
        return await self._client.status()

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop the engine."""
        await self._client.close(drain_s)

    def take(self) -> tuple[int, ...]:
        """Return the codes since the last call: of one line, where one is spoken at a time."""
        codes, self._codes = self._codes, []
        return tuple(codes)


def load_with_codes(model: str) -> tuple[LoadedVoice, CodeClient]:
    """Load a voice into this process, and what keeps its codes."""
    service = load_service({"model": {"model_path": model}} if model else {})
    assert service.synthesizer is not None
    client, known = CodeClient(service.client), service.synthesizer
    synthesizer = Synthesizer(client, service.prompts, known.voices, known.settings)
    return LoadedVoice(RunningService(replace(service, synthesizer=synthesizer))), client
