"""Higgs Audio v2 in the core: delayed codebooks, with the logits and frames of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llm.engine.engine import Engine, create_engine
from llm.errors import CheckpointError, RequestError
from llm.request import FinishReason, Request, SamplingParams, Token, TokenChunk
from llm.runner.model_runner import ModelRunner
from tests.llm.csm_checkpoints import edit_config
from tests.llm.engine.running import running
from tests.llm.higgs_checkpoints import (
    AUDIO_BEGIN,
    BEGIN,
    CODEBOOKS,
    CODES,
    DELAYS,
    END,
    TEXT_IDS,
    reference,
    reference_frames,
    reference_logits,
    write_higgs,
)
from tests.llm.llama_checkpoints import PAGES, batch, pipeline_config, row
from tests.llm.lora.adapters import merge, write_adapter
from tests.llm.models import engine_kinds
from tests.llm.models.engine_kinds import captured, tokens_of

NUM_FRAMES = 14
CLIP = DELAYS.delayed([(3, 2, 1), (0, 15, 7), (5, 5, 12), (9, 1, 0)])
SPOKEN: tuple[Token, ...] = (1, 4, AUDIO_BEGIN, *CLIP, *range(20, 29), AUDIO_BEGIN)
PROMPTS: list[tuple[Token, ...]] = [
    (1, 5, 7, 9, 2, AUDIO_BEGIN),
    SPOKEN,
    (1, 2, AUDIO_BEGIN),
    (1, 5, 7, *range(2, 30), AUDIO_BEGIN),
    (1, 5, 7, *range(2, 30), 3, AUDIO_BEGIN),
]

Frames = list[Token]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint whose model does not end by itself."""
    return write_higgs(tmp_path_factory.mktemp("higgs") / "model")


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint whose codebooks end as soon as any other code is as likely."""
    return write_higgs(tmp_path_factory.mktemp("higgs") / "ending", seed=3, ends=1.0)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Frames]:
    model = reference(folder)
    return [list(reference_frames(model, prompt, NUM_FRAMES)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with running(create_engine(pipeline_config(folder, max_batch_size=8))) as made:
        yield made


@pytest.fixture(scope="module")
def replaying(folder: Path) -> Iterator[Engine]:
    with running(captured(folder, samples=True, overlaps=True)) as made:
        yield made


def ask(engine: Engine, name: str, prompt: Sequence[Token], **values: Any) -> Iterator[TokenChunk]:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_FRAMES} | values)
    return engine.submit(Request(name, tuple(prompt), sampling))


@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_logits_of_every_codebook_are_those_of_transformers(
    folder: Path, prompt: tuple[Token, ...]
) -> None:
    runner = ModelRunner(pipeline_config(folder))
    runner.initialize()
    with torch.inference_mode():
        outputs = runner.forward(runner.prepare(batch(row(prompt, PAGES))))
        decoder, states = runner.loaded_model.frame_decoder, outputs.hidden_states
        assert decoder is not None
        assert states is not None
        frames, code = decoder.begin(states), torch.zeros(1, dtype=torch.int64)
        later = [frames.next_logits(code) for _ in range(CODEBOOKS - 1)]
    found = torch.cat([outputs.next_token_logits, *later])
    wanted = reference_logits(reference(folder), prompt)
    assert float((found - wanted).abs().max()) < 1e-4


def test_greedy_frames_alone_and_streamed(engine: Engine, expected: list[Frames]) -> None:
    for place, prompt in enumerate(PROMPTS):
        chunks = list(ask(engine, f"alone{place}", prompt))
        assert [token for chunk in chunks for token in chunk.token_ids] == expected[place]
        assert max(len(chunk.token_ids) for chunk in chunks) == 1
        assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert all(frames[0] == (BEGIN,) * CODEBOOKS for frames in expected)


ENGINES: dict[str, Callable[[Path], Engine]] = {
    **engine_kinds.ENGINES,
    "prompts in chunks": lambda f: create_engine(
        pipeline_config(f, max_batch_size=3, max_batch_input_tokens=8)
    ),
    "few pages": lambda f: create_engine(
        pipeline_config(f, num_pages=13, page_size=4, max_length=48, kvcache_ce_watermark=1.0)
    ),
}


@pytest.mark.parametrize("kind", ENGINES)
def test_greedy_frames_in_a_batch(folder: Path, expected: list[Frames], kind: str) -> None:
    with running(ENGINES[kind](folder)) as engine:
        for turn in range(2):  # the second time from the prefix cache
            streams = [ask(engine, f"{turn}.{n}", prompt) for n, prompt in enumerate(PROMPTS)]
            assert [tokens_of(stream) for stream in streams] == expected
        assert engine.drain(60)
        stats = engine.stats()
        assert stats.used_pages == 0
        assert stats.failed_steps == 0
        assert stats.preemptions > 0 or kind != "few pages"
        if kind.startswith("replayed"):
            assert stats.graphs is not None
            assert stats.graphs.prompt_replays > 0
            assert stats.graphs.eager_decodes == 0


@pytest.mark.parametrize("kind", ["one step at a time", "several steps a turn", "replayed ahead"])
def test_codebooks_end_as_in_transformers(ending: Path, kind: str) -> None:
    """By their delays, from the first end code of any codebook on."""
    model = reference(ending)
    prompts = [(n, 30 - n, AUDIO_BEGIN) for n in range(12)]
    expected = [list(reference_frames(model, prompt, 60)) for prompt in prompts]
    with running(ENGINES[kind](ending)) as engine:
        streams = [ask(engine, f"{n}", prompt, max_tokens=60) for n, prompt in enumerate(prompts)]
        chunks = [list(stream) for stream in streams]
    assert list(map(tokens_of, chunks)) == expected
    ended = [frames for frames in expected if len(frames) < 60]
    assert len(ended) > 5
    reasons = {
        own[-1].finish_reason
        for own, frames in zip(chunks, expected, strict=True)
        if frames in ended
    }
    assert reasons == {FinishReason.STOP}
    first = [next(n for n, frame in enumerate(frames) if END in frame) for frames in ended]
    begun = {frames[n].index(END) for n, frames in zip(first, ended, strict=True)}
    assert len(begun) > 1  # different codebooks have ended first


@pytest.mark.parametrize("kind", ["engine", "replaying"])
def test_a_seed_gives_the_same_frames_in_any_batch(
    request: pytest.FixtureRequest, kind: str
) -> None:
    engine = request.getfixturevalue(kind)
    values = {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "allowed_ranges": ((0, BEGIN),)}

    def asked(name: str, place: int) -> Iterator[TokenChunk]:
        return ask(engine, f"{kind}{name}{place}", PROMPTS[place], seed=place, **values)

    alone = [tokens_of(asked("alone", place)) for place in range(len(PROMPTS))]
    streams = [asked("batch", place) for place in range(len(PROMPTS))]
    assert [tokens_of(stream) for stream in streams] == alone
    for frames in alone:
        assert [frame.count(BEGIN) for frame in frames[:4] if isinstance(frame, tuple)] == [
            3,
            2,
            1,
            0,
        ]


def test_the_sampler_of_a_gpu_uses_the_same_numbers(engine: Engine, replaying: Engine) -> None:
    """Without cuts both draw by the same order of codes."""
    for place, prompt in enumerate(PROMPTS):
        values = {"seed": place, "temperature": 1.0, "allowed_ranges": ((0, 9), (12, 16))}
        found = [
            tokens_of(ask(made, f"s{place}", prompt, **values)) for made in (engine, replaying)
        ]
        assert found[0] == found[1]


def test_every_code_is_drawn_by_the_request_s_settings(engine: Engine) -> None:
    """But for the codes that are forced, which need not be in the allowed ranges."""
    values = {"temperature": 4.0, "allowed_ranges": ((2, 4), (7, 9)), "max_tokens": 60}
    found = tokens_of(ask(engine, "ranges", SPOKEN, min_tokens=40, **values))
    codes = {code for frame in found[3:40] if isinstance(frame, tuple) for code in frame}
    assert codes == {2, 3, 7, 8}


def test_no_codebook_ends_before_the_minimum(ending: Path) -> None:
    prompt = (5, 25, AUDIO_BEGIN)
    with running(create_engine(pipeline_config(ending))) as engine:
        early = tokens_of(ask(engine, "early", prompt, max_tokens=80))
        later = tokens_of(ask(engine, "later", prompt, max_tokens=80, min_tokens=40))
        never = tokens_of(ask(engine, "never", prompt, max_tokens=80, ignore_eos=True))
    assert len(early) < 40
    assert len(later) >= 40
    assert not any(END in frame for frame in later[:40] if isinstance(frame, tuple))
    assert len(never) == 80
    assert never[-1] != (END,) * CODEBOOKS


def test_a_cancelled_request_leaves_the_others_alone(
    engine: Engine, expected: list[Frames]
) -> None:
    doomed = engine.submit(Request("doomed", SPOKEN, SamplingParams(max_tokens=200)))
    others = [ask(engine, f"kept{n}", prompt) for n, prompt in enumerate(PROMPTS)]
    assert next(doomed).finish_reason is None
    doomed.cancel()
    assert [tokens_of(stream) for stream in others] == expected
    assert list(doomed)[-1].finish_reason is FinishReason.CANCELLED
    assert engine.stats().used_pages == 0


def test_a_prompt_of_one_token_is_text(folder: Path) -> None:
    """A captured forward of one token for each row is for frames, which have another MLP."""
    prompt = (*range(2, 18), AUDIO_BEGIN)
    wanted = list(reference_frames(reference(folder), prompt, 8))
    with running(captured(folder, samples=True, overlaps=False)) as engine:
        chunks = [list(ask(engine, f"{turn}", prompt, max_tokens=8)) for turn in range(2)]
    assert [tokens_of(own) for own in chunks] == [wanted, wanted]
    assert chunks[1][-1].cached_prompt_tokens == len(prompt) - 1


def test_adapters_change_both_paths(folder: Path, tmp_path: Path, expected: list[Frames]) -> None:
    """Requests with and without an adapter in one batch; those with it as if it were merged."""
    adapter = write_adapter(tmp_path / "adapter", folder, gain=0.5)
    lora = {"enable_lora": True, "lora_paths": [f"mine={adapter}"]}
    model = reference(merge(folder, adapter, tmp_path / "merged"))
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_FRAMES)
    with running(create_engine(pipeline_config(folder, lora=lora))) as engine:
        plain = [ask(engine, f"plain{n}", prompt) for n, prompt in enumerate(PROMPTS)]
        adapted = [
            engine.submit(Request(f"adapted{n}", prompt, sampling, lora="mine"))
            for n, prompt in enumerate(PROMPTS)
        ]
        assert [tokens_of(stream) for stream in plain] == expected
        found = [tokens_of(stream) for stream in adapted]
    assert found == [list(reference_frames(model, prompt, NUM_FRAMES)) for prompt in PROMPTS]
    assert found != expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((1, (1, 2)), f"prompt token 1 is not a text id below {TEXT_IDS} or 3 codes below {CODES}"),
        (((1, 2, CODES),), "prompt token 0 is not"),
        ((1, TEXT_IDS), "prompt token 1 is not"),
    ],
)
def test_a_request_that_cannot_run_is_refused(
    engine: Engine, prompt: tuple[Token, ...], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        ask(engine, "wrong", prompt)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_codebooks": 1}, r"num_codebooks=1 must be in \[2, 256\]"),
        ({"audio_stream_bos_id": CODES}, "audio_stream_bos_id=18 is no code below codebook_size"),
        ({"audio_stream_eos_id": -1}, "audio_stream_eos_id=-1 is no code"),
        ({"audio_stream_eos_id": None}, "has no 'audio_stream_eos_id'"),
        ({"codebook_size": None}, "has no 'codebook_size'"),
    ],
)
def test_a_wrong_configuration_is_an_error_before_weights_are_read(
    folder: Path, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    edit_config(tmp_path, **keys)
    with pytest.raises(CheckpointError, match=message):
        ModelRunner(pipeline_config(tmp_path))  # there are no weights


def test_missing_codebooks_are_an_error_before_weights_are_read(
    folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    name = "audio_lm_head.weight"
    save_file({name: tensors[name][:-CODES].contiguous()}, tmp_path / "model.safetensors")
    runner = ModelRunner(pipeline_config(tmp_path))
    with pytest.raises(CheckpointError, match=r"audio_lm_head.weight' has 36 rows, 3 codebooks"):
        runner.initialize()


def test_a_head_for_text_is_not_read(folder: Path, tmp_path: Path, expected: list[Frames]) -> None:
    """Published checkpoints have one, for training."""
    tensors = load_file(folder / "model.safetensors")
    tensors["text_lm_head.weight"] = torch.zeros(TEXT_IDS, 48)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with running(create_engine(pipeline_config(tmp_path))) as engine:
        assert tokens_of(ask(engine, "a", PROMPTS[0])) == expected[0]
