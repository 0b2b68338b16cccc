"""Qwen3-TTS in the core: logits and greedy frames are those of Qwen3 and Qwen3-Omni's predictor."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import RepetitionPenaltyLogitsProcessor

from llm.engine.engine import Engine, assemble_engine, create_engine
from llm.errors import CheckpointError, ConfigError, RequestError
from llm.pipeline.base import TextGenerationPipelineInterface
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.pipeline.text_generation import TextGenerationPipeline
from llm.request import (
    CodeSampling,
    FinishReason,
    Request,
    SamplingParams,
    Token,
    TokenChunk,
)
from llm.runner.model_runner import ModelRunner
from tests.llm.engine.running import running
from tests.llm.llama_checkpoints import PAGES, batch, float8_checkpoint, pipeline_config, row
from tests.llm.lora.adapters import merge, write_adapter
from tests.llm.qwen3_tts_checkpoints import (
    CODEBOOKS,
    CODES,
    END,
    LATER,
    PAD,
    TEXT_IDS,
    Adjust,
    Reference,
    edit_config,
    paired,
    write_qwen3_tts,
)
from tests.llm.runner.host_graphs import use_graphs
from tests.llm.runner.late_stream import LateStream

NUM_FRAMES = 10
MARKED: tuple[Token, ...] = (34, 5, 7, paired(PAD, 13), paired(36, 18), paired(9, 12))
FRAMES: tuple[Token, ...] = ((18, 2, 1, 0, PAD), (0, 0, 0, 0, 9), (3, 10, 10, 4, 0))
MIXED: tuple[Token, ...] = (*MARKED, *FRAMES[:2], 7, FRAMES[2], paired(PAD, 0))
VECTORS = torch.randn(2, 48, generator=torch.Generator().manual_seed(0)).numpy()
HEARD: tuple[Token, ...] = (*MARKED[:4], VECTORS[0].tobytes(), *MARKED[4:])
LONG: tuple[Token, ...] = tuple(
    (n % CODES, (n * 7) % LATER, 3, n % LATER, PAD if n % 2 else n) for n in range(25)
)
PROMPTS: list[tuple[Token, ...]] = [
    MARKED,
    MIXED,
    (1,),
    (*MARKED, *LONG, paired(4, 2)),
    (*MARKED, *LONG, paired(4, 3)),
    HEARD,
    (*HEARD, *LONG, VECTORS[1].tobytes(), (1, 2, 3, 4, 5), VECTORS[0].tobytes(), 7),
]
TEXTS: list[tuple[int, ...]] = [
    (),
    (5, 7, 37),
    (21,),
    (),
    (*range(20),),
    (9, 37),
    (*range(39, 9, -1),),
]
"""Text ids of the frames behind each prompt."""
TEXTS_OF = dict(zip(PROMPTS, TEXTS, strict=True))
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_FRAMES)

Frames = list[Token]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_tts(tmp_path_factory.mktemp("qwen3_tts") / "model")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Frames]:
    model = Reference.read(folder)
    found: list[Frames] = [
        list(model.frames(prompt, NUM_FRAMES, None, own)) for prompt, own in TEXTS_OF.items()
    ]
    plain: list[Frames] = [list(model.frames(prompt, NUM_FRAMES)) for prompt in PROMPTS]
    changed = [codes_of(one) != codes_of(other) for one, other in zip(found, plain, strict=True)]
    assert changed == [bool(texts) for texts in TEXTS]
    return found


def codes_of(frames: Frames) -> list[tuple[int, ...]]:
    return [frame[:CODEBOOKS] for frame in frames if isinstance(frame, tuple)]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with running(create_engine(pipeline_config(folder, max_batch_size=8))) as made:
        yield made


def ask(engine: Engine, name: str, prompt: Sequence[Token], **values: Any) -> Iterator[TokenChunk]:
    """Greedily, and with the texts of `TEXTS_OF`, unless `values` has others."""
    texts = TEXTS_OF.get(tuple(prompt), ())
    own: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": NUM_FRAMES,
        "frame_texts": texts,
    }
    sampling = SamplingParams(**own | values)
    return engine.submit(Request(name, tuple(prompt), sampling))


def frames_of(chunks: Iterator[TokenChunk]) -> Frames:
    return [token for chunk in chunks for token in chunk.token_ids]


def compared(folder: Path, same: Path | None = None) -> float:
    """Return the largest difference of the logits of a frame's codes from the reference's, which
    reads the folder `same` if there is one.
    """
    runner, frame = ModelRunner(pipeline_config(folder)), (4, 10, 0, 7)
    runner.initialize()
    prompt = (*MIXED, *HEARD)
    wanted = Reference.read(same or folder).logits(prompt, frame)
    with torch.inference_mode():
        outputs = runner.forward(runner.prepare(batch(row(prompt, PAGES))))
        decoder = runner.loaded_model.frame_decoder
        assert decoder is not None
        assert outputs.hidden_states is not None
        progress = decoder.begin(outputs.hidden_states)
        later = [progress.next_logits(torch.tensor([code]))[0] for code in frame[:-1]]
    found = [outputs.next_token_logits[0], *later]
    assert len(found) == CODEBOOKS
    return max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"predictor": {"hidden_size": 48}},  # as the 0.6B: no projection
        {"predictor": {"vocab_size": CODES}},
        {"seed": 1, "talker": {"rope_scaling": None, "tie_word_embeddings": True}},
    ],
)
def test_logits_of_every_codebook(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert compared(write_qwen3_tts(tmp_path, **keys)) < 1e-4


def test_a_float8_checkpoint_is_expanded(folder: Path, tmp_path: Path) -> None:
    """Also the projection of the text; this architecture runs in no format but floating point."""
    endings = "proj.weight linear_fc1.weight linear_fc2.weight"
    stored = float8_checkpoint(folder, tmp_path / "float8", "channel", endings=endings)
    tensors = load_file(stored / "model.safetensors")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale")}
    assert any("text_projection" in name for name in scales)
    for name, scale in scales.items():
        matrix = name.removesuffix("_scale")
        tensors[matrix] = tensors[matrix].float() * scale
    expanded = tmp_path / "expanded"
    expanded.mkdir()
    shutil.copy(folder / "config.json", expanded)
    save_file({k: v.float() for k, v in tensors.items()}, expanded / "model.safetensors")
    assert compared(stored, expanded) < 1e-4


def test_greedy_frames_alone_and_streamed(engine: Engine, expected: list[Frames]) -> None:
    assert any(len(frames) == NUM_FRAMES for frames in expected)
    for place, prompt in enumerate(PROMPTS):
        chunks = list(ask(engine, f"alone{place}", prompt))
        assert [token for chunk in chunks for token in chunk.token_ids] == expected[place]
        assert max(len(chunk.token_ids) for chunk in chunks) == 1
        assert chunks[-1].output_tokens == len(expected[place])
        assert chunks[-1].prompt_tokens == len(prompt)


def overlapping(folder: Path, **values: Any) -> Engine:
    config = pipeline_config(folder, max_batch_size=8, max_num_steps=1, **values)
    return assemble_engine(OverlapTextGenerationPipeline(config, stream=LateStream()), config)


def captured(folder: Path, *, overlaps: bool) -> Engine:
    """Return an engine that replays forwards and samples inside of them."""
    config = pipeline_config(folder, max_batch_size=8, max_batch_input_tokens=48)
    pipeline: TextGenerationPipelineInterface = TextGenerationPipeline(config)
    if overlaps:
        pipeline = OverlapTextGenerationPipeline(config, stream=LateStream())
    pipeline.runner.sample_on_device()
    use_graphs(pipeline.runner)
    return assemble_engine(pipeline, config)


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "one step at a time": lambda f: create_engine(pipeline_config(f, max_batch_size=8)),
    "prompts in chunks": lambda f: create_engine(
        pipeline_config(f, max_batch_size=3, max_batch_input_tokens=8)
    ),
    "several steps a turn": lambda f: create_engine(pipeline_config(f, max_num_steps=4)),
    "ahead of the results": overlapping,
    "replayed": lambda f: captured(f, overlaps=False),
    "replayed ahead": lambda f: captured(f, overlaps=True),
}


@pytest.mark.parametrize("kind", ENGINES)
def test_greedy_frames_in_a_batch(folder: Path, expected: list[Frames], kind: str) -> None:
    with running(ENGINES[kind](folder)) as engine:
        for turn in range(2):  # the second time from the prefix cache
            streams = [ask(engine, f"{turn}.{n}", prompt) for n, prompt in enumerate(PROMPTS)]
            assert [frames_of(stream) for stream in streams] == expected
        assert engine.drain(60)
        stats = engine.stats()
        assert (stats.used_pages, stats.failed_steps) == (0, 0)
        if kind.startswith("replayed"):
            assert stats.graphs is not None
            assert stats.graphs.replays > NUM_FRAMES
            assert stats.graphs.eager_decodes == 0
        engine.pipeline.kv_manager.check_integrity()


def repetition(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Penalise as the published program does."""
    penalise = RepetitionPenaltyLogitsProcessor(penalty=1.6)
    return penalise(torch.tensor([generated], dtype=torch.long), logits[None].clone())[0]


def counts_of_three(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Penalise presence and frequency among the last three frames."""
    counts = torch.bincount(torch.tensor(generated[-3:], dtype=torch.long), minlength=CODES)
    return logits - 0.7 * counts - 0.9 * (counts > 0)


PENALTIES: list[tuple[Adjust | None, dict[str, Any]]] = [
    (None, {}),
    (repetition, {"repetition_penalty": 1.6}),
    (
        counts_of_three,
        {"frequency_penalty": 0.7, "presence_penalty": 0.9, "penalty_window": 3},
    ),
]


@pytest.fixture(scope="module")
def penalised(folder: Path, expected: list[Frames]) -> list[list[Frames]]:
    """Frames of every prompt with each kind of penalties."""
    model, found = Reference.read(folder), [expected]
    for adjust, _ in PENALTIES[1:]:
        found.append(
            [list(model.frames(prompt, NUM_FRAMES, adjust, TEXTS_OF[prompt])) for prompt in PROMPTS]
        )
    assert all(one != other for one, other in combinations(found, 2))
    return found


@pytest.mark.parametrize("kind", ENGINES)
def test_penalties_count_first_codes(
    folder: Path, penalised: list[list[Frames]], kind: str
) -> None:
    """Only first codes of generated frames count; other requests share the batches."""
    with running(ENGINES[kind](folder)) as engine:
        streams = [
            [ask(engine, f"{n}.{m}", prompt, **values) for m, prompt in enumerate(PROMPTS)]
            for n, (_, values) in enumerate(PENALTIES)
        ]
        assert [[frames_of(stream) for stream in own] for own in streams] == penalised
        assert engine.stats().failed_steps == 0


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_request_that_was_preempted_is_penalised_as_before(
    folder: Path, penalised: list[list[Frames]], place: int, is_on_device: bool
) -> None:
    pipeline = TextGenerationPipeline(pipeline_config(folder))
    if is_on_device:
        pipeline.runner.sample_on_device()
    greedy = SamplingParams(temperature=0.0, **PENALTIES[place][1])
    for number, (prompt, frames) in enumerate(zip(PROMPTS, penalised[place], strict=True)):
        sampling = replace(greedy, frame_texts=TEXTS_OF[prompt])
        for known in range(1, len(frames)):
            made = frames[:known]
            name = f"{number}.{known}"
            fed = (*prompt, *made)
            again = row(fed, PAGES, request_id=name, sampling=sampling, output_ids=made)
            assert pipeline.execute(batch(again)).token_ids[name] == (frames[known],)
            pipeline.release(name)


@pytest.fixture(scope="module")
def replaying(folder: Path) -> Iterator[Engine]:
    with running(captured(folder, overlaps=False)) as made:
        yield made


@pytest.mark.parametrize("kind", ["engine", "replaying"])
def test_a_seed_gives_the_same_frames_in_any_batch(
    request: pytest.FixtureRequest, kind: str
) -> None:
    engine = request.getfixturevalue(kind)
    values = {"temperature": 1.3, "top_k": 9, "top_p": 0.9}
    kinds: list[dict[str, Any]] = [values, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.7}]

    def asked(name: str, place: int) -> Iterator[TokenChunk]:
        return ask(engine, name, PROMPTS[place], seed=place, **kinds[place % len(kinds)])

    alone = [frames_of(asked(f"alone{n}", n)) for n in range(len(PROMPTS))]
    streams = [asked(f"batch{n}", n) for n in range(len(PROMPTS))]
    assert [frames_of(stream) for stream in streams] == alone
    for frame in (frame for frames in alone for frame in frames):
        assert not isinstance(frame, int)
        assert max(frame[1:CODEBOOKS]) < LATER
        assert frame[0] != END


@pytest.mark.parametrize("penalties", [values for _, values in PENALTIES])
def test_a_device_draws_the_numbers_of_the_host(
    engine: Engine, replaying: Engine, penalties: dict[str, Any]
) -> None:
    """Where nothing is cut, the same number gives the same code."""
    values = {"temperature": 1.5, "seed": 7, "max_tokens": 40, "min_tokens": 40} | penalties
    drawn = [frames_of(ask(one, "drawn", MIXED, **values)) for one in (engine, replaying)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 20


def ranks(folder: Path, prompt: Sequence[Token], frames: Frames) -> list[list[int]]:
    """Return how many codes the reference finds likelier than each code, given all before it."""
    model, tokens, found = Reference.read(folder), [*prompt], list[list[int]]()
    for frame in frames:
        assert not isinstance(frame, int)
        logits = model.logits(tokens, frame)
        pairs = zip(logits, frame[:CODEBOOKS], strict=True)
        found.append([int((row > row[code]).sum()) for row, code in pairs])
        tokens.append(frame)
    return found


@pytest.mark.parametrize("kind", ["engine", "replaying"])
@pytest.mark.parametrize(
    ("later", "most"),
    [(CodeSampling(2.0, top_k=1), 0), (CodeSampling(0.0), 0), (CodeSampling(9.0, top_k=3), 2)],
)
def test_later_codes_are_drawn_in_their_own_way(
    request: pytest.FixtureRequest, folder: Path, kind: str, later: CodeSampling, most: int
) -> None:
    """While first codes are drawn from all; a neighbour in the batch draws all codes alike."""
    engine = request.getfixturevalue(kind)
    values = {"temperature": 3.0, "seed": 5, "max_tokens": 20, "min_tokens": 20}
    other = ask(engine, "other", MARKED, **values)
    frames = frames_of(ask(engine, "own", MIXED, later_codes=later, **values))
    found = ranks(folder, MIXED, frames)
    assert max(max(frame[1:]) for frame in found) == most
    assert max(frame[0] for frame in found) > 5
    assert max(max(frame[1:]) for frame in ranks(folder, MARKED, frames_of(other))) > 5


@pytest.mark.parametrize("kind", ["engine", "replaying"])
def test_later_codes_are_drawn_where_the_first_are_not(
    request: pytest.FixtureRequest, folder: Path, kind: str
) -> None:
    """The first code of every frame is the likeliest behind the frames that were drawn."""
    engine = request.getfixturevalue(kind)
    values = {"later_codes": CodeSampling(4.0), "max_tokens": 20, "min_tokens": 20}
    pair = [frames_of(ask(engine, f"s{seed}", MIXED, seed=seed, **values)) for seed in (1, 2)]
    assert pair[0] != pair[1]
    assert pair[0] == frames_of(ask(engine, "again", MIXED, seed=1, **values))
    for frames in pair:
        found = ranks(folder, MIXED, frames)
        # Before `min_tokens` the code that ends a sequence is left out.
        assert max(frame[0] for frame in found) <= 1
        assert max(max(frame[1:]) for frame in found) > 5


@pytest.mark.parametrize(
    "values", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_later_codes_have_the_limits_of_the_first(values: dict[str, Any]) -> None:
    for kind in (CodeSampling, SamplingParams):
        with pytest.raises(RequestError, match=next(iter(values))):
            kind(**values)


def test_a_window_that_a_device_cannot_count_is_refused(replaying: Engine) -> None:
    values = {"repetition_penalty": 1.1, "max_tokens": 10_000}
    with pytest.raises(RequestError, match="penalty_window=9000 must be at most 8192 on a GPU"):
        ask(replaying, "wide", (1,), penalty_window=9000, **values)


@pytest.mark.parametrize("kind", ["engine", "replaying"])
def test_a_first_code_ends_a_sequence(request: pytest.FixtureRequest, kind: str) -> None:
    """Whatever the other codes are; before `min_tokens` no frame begins with it."""
    engine = request.getfixturevalue(kind)
    values = {"temperature": 9.0, "allowed_ranges": ((1, 3), (END, END + 1)), "seed": 3}
    chunks = list(ask(engine, "ends", (1, 2), max_tokens=200, **values))
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert END not in {frame[0] for frame in frames_of(iter(chunks)) if not isinstance(frame, int)}
    later = frames_of(ask(engine, "later", (1, 2), max_tokens=200, min_tokens=40, **values))
    assert len(later) >= 40
    assert {frame[0] for frame in later if not isinstance(frame, int)} == {1, 2}


def test_a_cancelled_request_leaves_the_others_alone(
    engine: Engine, expected: list[Frames]
) -> None:
    free = SamplingParams(max_tokens=200, ignore_eos=True)
    doomed = engine.submit(Request("doomed", MIXED, free))
    others = [ask(engine, f"kept{n}", prompt) for n, prompt in enumerate(PROMPTS)]
    assert next(doomed).finish_reason is None
    doomed.cancel()
    assert [frames_of(stream) for stream in others] == expected
    assert list(doomed)[-1].finish_reason is FinishReason.CANCELLED
    assert engine.stats().used_pages == 0


def test_adapters_change_the_talker(folder: Path, tmp_path: Path, expected: list[Frames]) -> None:
    """Requests with and without an adapter in one batch; those with it as if it were merged."""
    adapter = write_adapter(tmp_path / "adapter", folder, gain=0.5)
    factors = load_file(adapter / "adapter_model.safetensors")
    own = {name: factor for name, factor in factors.items() if ".talker.model.layers." in name}
    save_file(own, adapter / "adapter_model.safetensors")
    model = Reference.read(merge(folder, adapter, tmp_path / "merged"))
    lora = {"enable_lora": True, "lora_paths": [f"mine={adapter}"]}
    with running(create_engine(pipeline_config(folder, lora=lora))) as engine:
        plain = [ask(engine, f"plain{n}", prompt) for n, prompt in enumerate(PROMPTS)]
        adapted = [
            engine.submit(
                Request(f"adapted{n}", prompt, replace(GREEDY, frame_texts=own), lora="mine")
            )
            for n, (prompt, own) in enumerate(TEXTS_OF.items())
        ]
        assert [frames_of(stream) for stream in plain] == expected
        found = [frames_of(stream) for stream in adapted]
    assert found == [model.frames(one, NUM_FRAMES, None, own) for one, own in TEXTS_OF.items()]
    assert found != expected


def test_a_vector_is_a_prefix_of_its_own(folder: Path) -> None:
    """Numbers that differ in their last bit are another voice."""
    other = VECTORS[0].copy()
    other[7] = np.nextafter(other[7], np.float32(9))
    with running(create_engine(pipeline_config(folder, page_size=4))) as engine:
        cached = []
        for name, vector in (("a", VECTORS[0]), ("b", VECTORS[0]), ("c", other)):
            prompt = (1, 2, 3, 4, vector.tobytes(), 6, 7, 8, 9)
            last = list(ask(engine, name, prompt))[-1]
            cached.append(last.cached_prompt_tokens)
        assert cached == [0, 8, 4]


def test_a_token_of_a_text_and_a_code_is_a_prefix_of_its_own(folder: Path) -> None:
    with running(create_engine(pipeline_config(folder, page_size=4))) as engine:
        cached = []
        for name, code in (("a", 3), ("b", 3), ("c", 4)):
            last = list(ask(engine, name, (1, 2, 3, 4, 5, 6, 7, paired(8, code), 1)))[-1]
            cached.append(last.cached_prompt_tokens)
        assert cached == [0, 8, 4]


def test_codes_with_another_text_are_another_prefix(folder: Path) -> None:
    """In prompts, and of frames that were generated."""
    with running(create_engine(pipeline_config(folder, page_size=4))) as engine:

        def cached(name: str, prompt: Sequence[Token]) -> int:
            return list(ask(engine, name, prompt))[-1].cached_prompt_tokens

        prompts = [(1, 2, 3, 4, 5, (1, 2, 3, 4, text), 6, 7, 8) for text in (9, 9, 10)]
        assert [cached(f"given{n}", prompt) for n, prompt in enumerate(prompts)] == [0, 8, 4]
        values = {"max_tokens": 9, "min_tokens": 9, "frame_texts": (*range(20, 28),)}
        made = frames_of(ask(engine, "made", (11, 12, 13, 14), **values))
        assert [frame[-1] for frame in made if isinstance(frame, tuple)] == [*range(20, 28), PAD]
        known = (11, 12, 13, 14, *made[:8], 1)
        assert cached("again", known) == 12
        changed = known[9]
        assert isinstance(changed, tuple)
        assert cached("other", (*known[:9], (*changed[:-1], 3), *known[10:])) == 8


@pytest.mark.parametrize("kind", ["waits for results", "ahead of the results"])
def test_a_request_that_lost_its_pages_has_the_same_texts(
    folder: Path, expected: list[Frames], kind: str
) -> None:
    values = {"page_size": 4, "num_pages": 16}
    engine = (
        overlapping(folder, **values)
        if kind == "ahead of the results"
        else create_engine(pipeline_config(folder, max_batch_size=8, **values))
    )
    with running(engine):
        streams = [ask(engine, f"{n}", prompt) for n, prompt in enumerate(PROMPTS)]
        assert [frames_of(stream) for stream in streams] == expected
        stats = engine.stats()
        assert stats.preemptions > 0
        assert (stats.used_pages, stats.failed_steps) == (0, 0)


@pytest.mark.parametrize(
    ("prompt", "values", "message"),
    [
        ((1, (1, 2, 3)), {}, "prompt token 1 is not a text id below"),
        (((1, 2, LATER, 1, 0),), {}, f"4 codes below {CODES}, from the second on below {LATER}"),
        (((CODES, 2, 3, 1, 0),), {}, "prompt token 0 is not"),
        (((1, 2, 3, 1),), {}, f"prompt token 0 is not .*, and a text id below {TEXT_IDS}"),
        (((1, 2, 3, 1, TEXT_IDS),), {}, "prompt token 0 is not"),
        (((1, 2, 3, 1, -1),), {}, "prompt token 0 is not"),
        ((1,), {"frame_texts": (1, TEXT_IDS)}, f"frame_texts must be text ids below {TEXT_IDS}"),
        ((1,), {"frame_texts": (-1,)}, "frame_texts must be text ids"),
        ((paired(TEXT_IDS - 1, CODES - 1) + 1,), {}, "prompt token 0 is not"),
        ((VECTORS[0][1:].tobytes(),), {}, "or a vector of 48 finite numbers"),
        ((1, (VECTORS[0] * np.nan).tobytes()), {}, "prompt token 1 is not"),
        ((1,), {"stop_token_ids": (VECTORS[0].tobytes(),)}, "stop token 0 is not 4 codes below"),
        ((1,), {"allowed_cycle": (((0, 3),),)}, "does not support allowed_cycle"),
    ],
)
def test_a_request_that_cannot_run_is_refused(
    engine: Engine, prompt: tuple[Token, ...], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        ask(engine, "wrong", prompt, **values)


@pytest.mark.parametrize(
    ("path", "keys", "message"),
    [
        ((), {"tokenizer_type": "qwen3_tts_tokenizer_25hz"}, "25hz' is not supported"),
        ((), {"tts_pad_token_id": TEXT_IDS}, f"tts_pad_token_id={TEXT_IDS} is no text id"),
        ((), {"talker_config": []}, "talker_config must be an object"),
        (("talker_config",), {"num_code_groups": 5}, "num_code_groups=4 does not fit the talker's"),
        (("talker_config",), {"num_code_groups": 1}, "num_code_groups=1 is not in 2"),
        (("talker_config",), {"codec_eos_token_id": CODES}, f"codec_eos_token_id={CODES} is no"),
        (("talker_config",), {"vocab_size": 7}, "vocab_size=7 is below the code predictor's 11"),
        (("talker_config",), {"text_vocab_size": 2**30}, "exceeds 31 bits"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused(
    folder: Path, tmp_path: Path, path: tuple[str, ...], keys: dict[str, Any], message: str
) -> None:
    """Before any weight is read: there are none."""
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    edit_config(tmp_path, *path, **keys)
    with pytest.raises(CheckpointError, match=message):
        create_engine(pipeline_config(tmp_path))


@pytest.mark.parametrize("name", ["lm_head.2.weight", "model.codec_embedding.2.weight"])
def test_a_missing_codebook_is_an_error(folder: Path, tmp_path: Path, name: str) -> None:
    weights = load_file(write_qwen3_tts(tmp_path) / "model.safetensors")
    del weights[f"talker.code_predictor.{name}"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="the weights do not have 4 codebooks"):
        create_engine(pipeline_config(tmp_path))


def test_the_speaker_encoder_is_left_to_the_service(tmp_path: Path) -> None:
    weights = load_file(write_qwen3_tts(tmp_path) / "model.safetensors")
    save_file(
        weights | {"speaker_encoder.fc.weight": torch.ones(3)}, tmp_path / "model.safetensors"
    )
    create_engine(pipeline_config(tmp_path)).shutdown()


def test_the_length_is_that_of_the_talker(engine: Engine, folder: Path) -> None:
    assert engine.pipeline.max_seq_len == 256
    with pytest.raises(ConfigError, match=r"max_length=257 .*max_position_embeddings=256"):
        create_engine(pipeline_config(folder, max_length=257))
