"""Models of frames on a GPU: in batches the frames of the references, eagerly and from CUDA graphs
that contain the frame decoder and the sampling of every code. Those of Qwen3-TTS have texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from llm.config import PipelineConfig
from llm.engine.engine import Engine, create_engine
from llm.request import Request, SamplingParams, Token
from tests.llm import csm_checkpoints, higgs_checkpoints, qwen3_tts_checkpoints
from tests.llm.models import test_csm, test_higgs_audio_v2, test_qwen3_tts
from tests.llm.models.engine_kinds import tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_FRAMES = 10
Frames = list[Token]
Prompts = Sequence[tuple[Token, ...]]


def csm_frames(folder: Path, prompts: Prompts) -> list[Frames]:
    model = csm_checkpoints.reference(folder)
    return [list(csm_checkpoints.reference_frames(model, one, NUM_FRAMES)) for one in prompts]


def higgs_frames(folder: Path, prompts: Prompts) -> list[Frames]:
    model = higgs_checkpoints.reference(folder)
    return [list(higgs_checkpoints.reference_frames(model, one, NUM_FRAMES)) for one in prompts]


def qwen3_tts_frames(folder: Path, prompts: Prompts) -> list[Frames]:
    model = qwen3_tts_checkpoints.Reference.read(folder)
    texts = test_qwen3_tts.TEXTS_OF
    return [list(model.frames(one, NUM_FRAMES, None, texts[tuple(one)])) for one in prompts]


MODELS: dict[
    str, tuple[Callable[[Path], Path], Callable[[Path, Prompts], list[Frames]], Prompts]
] = {
    "csm": (csm_checkpoints.write_csm, csm_frames, test_csm.PROMPTS),
    "higgs_audio_v2": (higgs_checkpoints.write_higgs, higgs_frames, test_higgs_audio_v2.PROMPTS),
    "qwen3_tts": (
        qwen3_tts_checkpoints.write_qwen3_tts,
        qwen3_tts_frames,
        test_qwen3_tts.PROMPTS,
    ),
}


def engine_of(folder: Path, *, captures: bool, overlaps: bool) -> Engine:
    config = PipelineConfig(
        model={
            "model_path": str(folder),
            "device_specs": ["cuda"],
            "attention_backend": "gathered",
            "quantization_encoding": "float32",
            "disable_cuda_graph": not captures,
            "kv_cache": {"kv_cache_page_size": 16, "num_pages": 64},
        },
        max_batch_size=8,
        max_num_steps=1,
        enable_overlap_scheduler=overlaps,
    )
    engine = create_engine(config)
    engine.start()
    return engine


def all_frames(
    engine: Engine, name: str, prompts: Prompts, samplings: Iterable[SamplingParams]
) -> list[Frames]:
    """Return the frames of all prompts in one batch."""
    streams = [
        engine.submit(Request(f"{name}.{place}", prompt, sampling))
        for place, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    return [tokens_of(stream) for stream in streams]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_greedy_and_drawn_frames_in_a_batch(
    tmp_path: Path, kind: str, captures: bool, overlaps: bool
) -> None:
    write, frames, prompts = MODELS[kind]
    folder = write(tmp_path / "model")
    expected = frames(folder, prompts)
    texts = test_qwen3_tts.TEXTS if kind == "qwen3_tts" else [()] * len(prompts)
    own = [SamplingParams(max_tokens=NUM_FRAMES, frame_texts=one) for one in texts]
    greedy = [replace(one, temperature=0.0) for one in own]
    drawn = [replace(one, top_k=7, seed=place) for place, one in enumerate(own)]
    engine = engine_of(folder, captures=captures, overlaps=overlaps)
    try:
        for turn in range(2):
            assert all_frames(engine, f"greedy {turn}", prompts, greedy) == expected
        together = all_frames(engine, "together", prompts, drawn)
        alone = [
            all_frames(engine, f"alone {place}", prompts[place : place + 1], [sampling])[0]
            for place, sampling in enumerate(drawn)
        ]
        assert together == alone
        assert together != expected
        graphs = engine.stats().graphs
        assert (graphs is not None) == captures
        assert graphs is None or (graphs.replays > NUM_FRAMES and graphs.eager_decodes == 0)
    finally:
        engine.shutdown()
