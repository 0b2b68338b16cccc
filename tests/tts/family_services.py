"""Services of the speech families on random checkpoints, with their components."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoder import AudioDecoder, create_decoder
from llm import Token
from tests.tts.family_checkpoints import (
    write_csm_family,
    write_higgs_family,
    write_llasa,
    write_neutts,
    write_orpheus,
    write_qwen3_tts_family,
    write_sonant,
    write_vyvo,
)
from tts.config.pipeline import AudioGenerationConfig
from tts.engine.client import EngineClient
from tts.factory import Service
from tts.families.base import SpeechFamily, SpeechVocabulary
from tts.v1 import common_pb2
from tts.v1 import speech_pb2 as pb

LLAMA_SYSTEM = [128000, 128006, 9125, 128007, 271, 34, 84, 83, 83, 72, 77, 70, 33025, 2696, 25]
LLAMA_SYSTEM += [6790, 220, 2366, 18, 198, 15724, 2696, 25, 220, 1627, 10263, 220, 2366, 19, 271]
LLAMA_SYSTEM += [128009, 128006, 882, 128007, 271]  # Cutting … Date … Today … user
CONVERT = [12281, 279, 1495, 311, 8982, 25]
ASSISTANT = [128009, 128006, 78191, 128007, 271]
USER_SPELLED = [84, 82, 68, 81, 25, 220, 34, 78, 77, 85, 68, 81, 83, 220, 83, 71, 68, 220, 83, 68]
USER_SPELLED += [87, 83, 220, 83, 78, 220, 82, 79, 68, 68, 66, 71, 25]  # user: Convert …
HELLO_PHONEMES = [71, 133, 247, 75, 135, 230, 78, 134, 232]  # həlˈoʊ in UTF-8
ASSISTANT_SPELLED = [198, 64, 82, 82, 72, 82, 83, 64, 77, 83, 25]  # \nassistant:
HIGGS_SYSTEM = [128000, 128006, 9125, 128007, 271]  # system
HIGGS_SYSTEM += [
    38,
    68,
    77,
    68,
    81,
    64,
    83,
    68,
    220,
    64,
    84,
    67,
    72,
    78,
    220,
    69,
    78,
    75,
    75,
    78,
]  # Generate audio …
HIGGS_SYSTEM += [86, 72, 77, 70, 220, 72, 77, 82, 83, 81, 84, 66, 83, 72, 78, 77, 13, 198, 198]
HIGGS_SYSTEM += [
    128011,
    198,
    32,
    84,
    67,
    72,
    78,
    220,
    72,
    82,
    220,
    81,
    68,
    66,
    78,
    81,
    67,
    68,
    67,
    220,
]  # Audio is …
HIGGS_SYSTEM += [
    69,
    81,
    78,
    76,
    220,
    64,
    220,
    80,
    84,
    72,
    68,
    83,
    220,
    81,
    78,
    78,
    76,
    13,
    198,
    128012,
]
HIGGS_SYSTEM += [128009]
HIGGS_HELLO = [128006, 882, 128007, 271, 15339, 128009, 128006, 78191, 128007, 271, 128013]
FRAME = (0, 1, 2, 3, 4, 5, 4095)


@dataclass(frozen=True)
class Case:
    """One family: its checkpoint, expected values and literal prompts of "hello"."""

    name: str
    write: Callable[[Path], Path]
    codec: str
    rate: int
    codes_per_second: float
    voices: tuple[str, ...]
    plain: tuple[Token, ...]  # in the default voice
    prompted: tuple[Token, ...]  # in a voice whose clip says "hello" too
    codes: tuple[int, ...] = (0, 65535)  # of that clip
    row: tuple[int, ...] = ()  # of the default voice, for a codec that needs it
    text_ids: int = 2**31  # number of text ids, where larger tokens are text ids with a code

    @property
    def prompt_codes(self) -> tuple[int, ...]:
        """The codes of `selection` that the codec gets."""
        return self.row if self.voices else self.codes

    @property
    def selection(self) -> pb.VoiceSelection:
        """A voice that the family can speak in."""
        if self.voices:
            return pb.VoiceSelection()
        return pb.VoiceSelection(prompt_tokens=pb.SpeechTokens(tokens=self.codes))


CASES = [
    Case(
        "orpheus",
        write_orpheus,
        codec="snac",
        rate=24_000,
        codes_per_second=82.03125,
        voices=("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe"),
        plain=(128259, 128000, 83, 64, 81, 64, 25, 24748, 128009, 128260, 128261, 128257),
        prompted=(
            *(128259, 128000, 15339, 128009, 128260, 128261, 128257),
            *(128266, 132363, 136460, 140557, 144654, 148751, 156937),
            *(128258, 128262),
            *(128259, 128000, 15339, 128009, 128260, 128261, 128257),
        ),
        codes=FRAME,
    ),
    Case(
        "vyvo",
        write_vyvo,
        codec="snac",
        rate=24_000,
        codes_per_second=82.03125,
        voices=("default",),
        plain=(151672, 71, 68, 75, 75, 78, 151645, 151673, 151674, 151670),
        prompted=(
            *(151672, 71, 68, 75, 75, 78, 151645, 151673, 151674, 151670),
            *(151679, 155776, 159873, 163970, 168067, 172164, 180350),
            *(151671, 151675),
            *(151672, 71, 68, 75, 75, 78, 151645, 151673, 151674, 151670),
        ),
        codes=FRAME,
    ),
    Case(
        "llasa",
        write_llasa,
        codec="xcodec2",
        rate=16_000,
        codes_per_second=50,
        voices=("default",),
        plain=(*LLAMA_SYSTEM, *CONVERT, 128258, 15339, 128259, *ASSISTANT, 128260),
        prompted=(
            *(*LLAMA_SYSTEM, *CONVERT, 128258, 15339, 24748, 128259, *ASSISTANT, 128260),
            *(128264, 193799),
        ),
    ),
    Case(
        "neutts",
        write_neutts,
        codec="neucodec",
        rate=24_000,
        codes_per_second=50,
        voices=(),
        plain=(),
        prompted=(
            *(*USER_SPELLED, 151666, *HELLO_PHONEMES, 220, *HELLO_PHONEMES, 151667),
            *(*ASSISTANT_SPELLED, 151669, 151671, 217206),
        ),
    ),
    Case(
        "csm",
        write_csm_family,
        codec="mimi",
        rate=24_000,
        codes_per_second=87.5,
        voices=("0", "1", "2", "3"),
        plain=(128000, 58, 15, 60, 71, 68, 75, 75, 78, 128001),  # [0]hello
        prompted=(
            *(128000, 58, 15, 60, 71, 68, 75, 75, 78, 128001),
            *((0, 1, 2, 3, 4, 5, 15), (9, 0, 0, 0, 0, 0, 9), (0,) * 7),
            *(128000, 58, 15, 60, 71, 68, 75, 75, 78, 128001),
        ),
        codes=(0, 1, 2, 3, 4, 5, 15, 9, 0, 0, 0, 0, 0, 9),
    ),
    Case(
        "higgs_audio_v2",
        write_higgs_family,
        codec="higgs_audio_v2_tokenizer",
        rate=24_000,
        codes_per_second=175,
        voices=("default",),
        plain=(*HIGGS_SYSTEM, *HIGGS_HELLO),
        prompted=(
            *(*HIGGS_SYSTEM, *HIGGS_HELLO),
            (16, 16, 16, 16, 16, 16, 16),
            (0, 16, 16, 16, 16, 16, 16),
            (9, 1, 16, 16, 16, 16, 16),
            (17, 0, 2, 16, 16, 16, 16),
            (17, 17, 0, 3, 16, 16, 16),
            (17, 17, 17, 0, 4, 16, 16),
            (17, 17, 17, 17, 0, 5, 16),
            (17, 17, 17, 17, 17, 0, 15),
            (17, 17, 17, 17, 17, 17, 9),
            (17, 17, 17, 17, 17, 17, 17),
            *(128015, 128009, *HIGGS_HELLO),
        ),
        codes=(0, 1, 2, 3, 4, 5, 15, 9, 0, 0, 0, 0, 0, 9),
    ),
    Case(
        "qwen3_tts",
        write_qwen3_tts_family,
        codec="qwen3_tts_tokenizer_12hz",
        rate=24_000,
        codes_per_second=87.5,
        voices=("vivian", "eric"),
        plain=(
            *(151644, 77091, 198),
            *(327725687, 327877623, 328029559, 465987447),  # pad + nothink, begin, end, vivian
            *(326662136, 326525454, 326662137, 326814071),  # bos, hello and eos + pad; pad + bos
        ),
        prompted=(
            *(151644, 77091, 198),
            *(327725687, 327877623, 328029559),
            *(326662136, 326525454, 326525454, 326662137, 326814071),
            *((0, 1, 2, 3, 4, 5, 15, 151671), (9, 0, 0, 0, 0, 0, 9, 151671)),
        ),
        codes=(0, 1, 2, 3, 4, 5, 15, 9, 0, 0, 0, 0, 0, 9),
        text_ids=151_936,
    ),
    Case(
        "sonant",
        write_sonant,
        codec="source_filter",
        rate=24_000,
        codes_per_second=25,
        voices=("hazel", "owen"),
        plain=(449, 450, 451, 452, 71, 68, 75, 75, 78, 257),
        prompted=(457, 448, 511, 450, 71, 68, 75, 75, 78, 257),
        codes=(9, 0, 63, 2),
        row=(1, 2, 3, 4),
    ),
]


@dataclass(frozen=True)
class Running:
    """A family's service and its components."""

    case: Case
    service: Service
    folder: Path

    @property
    def family(self) -> SpeechFamily:
        assert self.service.prompts.family is not None
        return self.service.prompts.family

    @property
    def vocabulary(self) -> SpeechVocabulary:
        assert self.service.prompts.vocabulary is not None
        return self.service.prompts.vocabulary

    @property
    def client(self) -> EngineClient:
        return self.service.client

    def decoder(self) -> AudioDecoder:
        """Return another codec with the service's seeded weights."""
        own = self.folder / self.family.traits.codec
        return create_decoder(own if own.is_dir() else self.folder, test_mode=True)


def configured(folder: Path, **values: Any) -> AudioGenerationConfig:
    own: dict[str, Any] = {
        "audio_decoder": "auto",
        "run_model_test_mode": True,
        "max_batch_size": 8,
        "max_length": 2048,
        "model": {
            "model_path": str(folder),
            "kv_cache": {"kv_cache_page_size": 16, "num_pages": 512},
        },
    }
    return AudioGenerationConfig(**AudioGenerationConfig.merged(own, values))


def exactly(count: int) -> dict[str, Any]:
    """Return sampling values for exactly this number of tokens."""
    sampling = common_pb2.SamplingParams(seed=7, min_tokens=count, max_tokens=count)
    return {"seed": None, "sampling": sampling}
