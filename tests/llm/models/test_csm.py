"""CSM in the core: frames as tokens, with the logits and the greedy frames of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CsmForConditionalGeneration

from llm.engine.engine import Engine, create_engine
from llm.errors import CheckpointError, ConfigError, RequestError
from llm.request import (
    CodeSampling,
    FinishReason,
    Request,
    SamplingParams,
    Token,
    TokenChunk,
)
from llm.runner.model_runner import ModelRunner
from tests.llm.csm_checkpoints import (
    CODEBOOKS,
    CODES,
    DEPTH,
    TEXT_IDS,
    edit_config,
    reference,
    reference_frames,
    reference_logits,
    write_csm,
)
from tests.llm.engine.running import running
from tests.llm.llama_checkpoints import PAGES, batch, pipeline_config, row
from tests.llm.lora.adapters import merge, write_adapter
from tests.llm.models import engine_kinds
from tests.llm.models.engine_kinds import captured, tokens_of

NUM_FRAMES = 10
MIXED: tuple[Token, ...] = (1, 5, (3, 2, 1, 0), (0, 0, 0, 0), 7, (18, 0, 18, 4), 9)
PROMPTS: list[tuple[Token, ...]] = [
    (1, 5, 7, 9, 2),
    MIXED,
    (1,),
    (1, 5, 7, *(((n * 7) % CODES, n % CODES, 3, (n * 5) % CODES) for n in range(25)), 4, 4),
    (1, 5, 7, *(((n * 7) % CODES, n % CODES, 3, (n * 5) % CODES) for n in range(25)), 4, 8),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_FRAMES)
ENDED = (0,) * CODEBOOKS

Frames = list[Token]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_csm(tmp_path_factory.mktemp("csm") / "model")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Frames]:
    model = reference(folder)
    return [list(reference_frames(model, prompt, NUM_FRAMES)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with running(create_engine(pipeline_config(folder, max_batch_size=8))) as made:
        yield made


def ask(engine: Engine, name: str, prompt: Sequence[Token], **values: Any) -> Iterator[TokenChunk]:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_FRAMES} | values)
    return engine.submit(Request(name, tuple(prompt), sampling))


def compared(folder: Path, model: CsmForConditionalGeneration) -> float:
    """Return the largest difference of the logits of a frame's codes from those of transformers."""
    runner, frame = ModelRunner(pipeline_config(folder)), (4, 18, 0, 7)
    runner.initialize()
    with torch.inference_mode():
        outputs = runner.forward(runner.prepare(batch(row(MIXED, PAGES))))
        decoder = runner.loaded_model.frame_decoder
        assert decoder is not None
        assert outputs.hidden_states is not None
        progress = decoder.begin(outputs.hidden_states)
        later = [progress.next_logits(torch.tensor([code])) for code in frame[:-1]]
        found = torch.cat([outputs.next_token_logits, *later])
    return float((found - reference_logits(model, MIXED, frame)).abs().max())


def test_logits_of_every_codebook_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    assert compared(folder, reference(folder)) < 1e-4
    untied = write_csm(tmp_path / "untied", seed=1, tie_codebooks_embeddings=False)
    assert compared(untied, reference(untied)) < 1e-4


def test_greedy_frames_alone_and_streamed(engine: Engine, expected: list[Frames]) -> None:
    for place, prompt in enumerate(PROMPTS):
        chunks = list(ask(engine, f"alone{place}", prompt))
        assert [token for chunk in chunks for token in chunk.token_ids] == expected[place]
        assert max(len(chunk.token_ids) for chunk in chunks) == 1
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert chunks[-1].output_tokens == NUM_FRAMES
        assert chunks[-1].prompt_tokens == len(prompt)


ENGINES: dict[str, Callable[[Path], Engine]] = {
    **engine_kinds.ENGINES,
    "prompts in chunks": lambda f: create_engine(
        pipeline_config(f, max_batch_size=3, max_batch_input_tokens=8)
    ),
    "few pages": lambda f: create_engine(
        pipeline_config(f, num_pages=12, page_size=4, max_length=40, kvcache_ce_watermark=1.0)
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
            assert stats.graphs.replays > NUM_FRAMES
            assert stats.graphs.prompt_replays > 0
            assert stats.graphs.eager_decodes == 0
        engine.pipeline.kv_manager.check_integrity()


@pytest.fixture(scope="module")
def replaying(folder: Path) -> Iterator[Engine]:
    with running(captured(folder, samples=True, overlaps=False)) as made:
        yield made


@pytest.mark.parametrize("kind", ["engine", "replaying"])
def test_a_seed_gives_the_same_frames_in_any_batch(
    request: pytest.FixtureRequest, kind: str
) -> None:
    engine = request.getfixturevalue(kind)
    values = {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "top_logprobs": 2}
    kinds: list[dict[str, Any]] = [values, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.7}]

    def asked(name: str, place: int) -> list[TokenChunk]:
        own = kinds[place % len(kinds)]
        return list(ask(engine, name, PROMPTS[place], seed=place, **own))

    def told(chunks: list[TokenChunk]) -> object:
        return [(chunk.token_ids, chunk.logprobs) for chunk in chunks if chunk.token_ids]

    alone = [told(asked(f"alone{n}", n)) for n in range(len(PROMPTS))]
    streams = [
        ask(engine, f"batch{n}", prompt, seed=n, **kinds[n % len(kinds)])
        for n, prompt in enumerate(PROMPTS)
    ]
    assert [told(list(stream)) for stream in streams] == alone
    assert tokens_of(ask(engine, "other", MIXED, seed=99, temperature=1.0)) != tokens_of(
        ask(engine, "another", MIXED, seed=98, temperature=1.0)
    )


def test_the_sampler_of_a_gpu_uses_the_same_numbers(engine: Engine, replaying: Engine) -> None:
    """Without cuts both draw by the same order of codes."""
    for place, prompt in enumerate(PROMPTS):
        values = {"seed": place, "temperature": 1.0, "allowed_ranges": ((0, 9), (12, 16))}
        found = [
            tokens_of(ask(made, f"s{place}", prompt, **values)) for made in (engine, replaying)
        ]
        assert found[0] == found[1]


def test_every_code_is_drawn_by_the_request_s_settings(engine: Engine) -> None:
    values = {"temperature": 4.0, "allowed_ranges": ((2, 4), (7, 9)), "max_tokens": 40}
    found = tokens_of(ask(engine, "ranges", MIXED, **values))
    assert {code for frame in found if not isinstance(frame, int) for code in frame} == {2, 3, 7, 8}
    greedy = tokens_of(ask(engine, "greedy", MIXED))
    assert tokens_of(ask(engine, "one", MIXED, temperature=2.0, top_k=1)) == greedy


@pytest.mark.parametrize("kind", ["engine", "replaying"])
def test_later_codes_are_the_likeliest_behind_drawn_ones(
    request: pytest.FixtureRequest, folder: Path, kind: str
) -> None:
    engine, model = request.getfixturevalue(kind), reference(folder)
    values = {"temperature": 3.0, "seed": 4, "later_codes": CodeSampling(temperature=0.0)}
    tokens, drawn = [*MIXED], 0
    for frame in tokens_of(ask(engine, "own", MIXED, **values)):
        assert not isinstance(frame, int)
        best = reference_logits(model, tokens, frame).argmax(-1).tolist()
        assert frame[1:] == tuple(best[1:])
        drawn += frame[0] != best[0]
        tokens.append(frame)
    assert drawn


def test_log_probabilities_are_those_of_the_first_codes(engine: Engine, folder: Path) -> None:
    chunks = list(ask(engine, "scored", MIXED, top_logprobs=3, max_tokens=1))
    ((frame,), (entry,)) = chunks[0].token_ids, chunks[0].logprobs
    assert not isinstance(frame, int)
    logits = reference_logits(reference(folder), MIXED, frame)[0]
    wanted = logits.log_softmax(-1)
    assert entry.token_id == frame[0]
    assert entry.logprob == pytest.approx(float(wanted.max()), abs=1e-4)
    assert [token for token, _ in entry.top] == wanted.topk(3).indices.tolist()


def test_a_frame_of_zeros_ends_a_sequence(engine: Engine) -> None:
    """Zeros among other codes do not; before `min_tokens` no frame begins with one."""
    values = {"temperature": 9.0, "allowed_ranges": ((0, 2),), "max_tokens": 200, "seed": 3}
    chunks = list(ask(engine, "ends", (1, 2), **values))
    assert chunks[-1].finish_reason is FinishReason.STOP
    frames = [token for chunk in chunks for token in chunk.token_ids]
    assert ENDED not in frames
    assert any(frame[0] == 0 for frame in frames if not isinstance(frame, int))
    later = tokens_of(ask(engine, "later", (1, 2), min_tokens=60, **values))
    assert len(later) >= 60
    assert all(frame[0] == 1 for frame in later[:60] if not isinstance(frame, int))


def test_adapters_change_the_backbone(folder: Path, tmp_path: Path, expected: list[Frames]) -> None:
    """Requests with and without an adapter in one batch; those with it as if it were merged."""
    adapter = write_adapter(tmp_path / "adapter", folder, gain=0.5)
    factors = load_file(adapter / "adapter_model.safetensors")
    lora = {"enable_lora": True, "lora_paths": [f"mine={adapter}"]}
    with pytest.raises(CheckpointError, match="modules that cannot be adapted: "):
        create_engine(pipeline_config(folder, lora=lora))
    own = {name: factor for name, factor in factors.items() if ".backbone_model." in name}
    save_file(own, adapter / "adapter_model.safetensors")
    model = reference(merge(folder, adapter, tmp_path / "merged"))
    with running(create_engine(pipeline_config(folder, lora=lora))) as engine:
        plain = [ask(engine, f"plain{n}", prompt) for n, prompt in enumerate(PROMPTS)]
        adapted = [
            engine.submit(Request(f"adapted{n}", prompt, GREEDY, lora="mine"))
            for n, prompt in enumerate(PROMPTS)
        ]
        assert [tokens_of(stream) for stream in plain] == expected
        found = [tokens_of(stream) for stream in adapted]
    assert found == [list(reference_frames(model, prompt, NUM_FRAMES)) for prompt in PROMPTS]
    assert found != expected


def test_rows_of_the_depth_transformer_do_not_depend_on_each_other(folder: Path) -> None:
    """Bit for bit: neither on the number of rows nor on their order."""
    runner = ModelRunner(pipeline_config(folder))
    runner.initialize()
    decoder = runner.loaded_model.frame_decoder
    assert decoder is not None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(33, 48, generator=generator)
    codes = torch.randint(CODES, (CODEBOOKS - 1, 33), generator=generator)

    def logits(rows: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            frames = decoder.begin(hidden[rows])
            return torch.stack([frames.next_logits(column[rows]) for column in codes], dim=1)

    whole = logits(list(range(33)))
    for rows in ([0], [32], [7, 3], list(range(32, -1, -1)), list(range(5, 22))):
        assert torch.equal(logits(rows), whole[rows])


def test_a_cancelled_request_leaves_the_others_alone(
    engine: Engine, expected: list[Frames]
) -> None:
    doomed = engine.submit(Request("doomed", MIXED, SamplingParams(max_tokens=200)))
    others = [ask(engine, f"kept{n}", prompt) for n, prompt in enumerate(PROMPTS)]
    first = next(doomed)
    assert first.finish_reason is None
    doomed.cancel()
    assert [tokens_of(stream) for stream in others] == expected
    assert list(doomed)[-1].finish_reason is FinishReason.CANCELLED
    assert engine.stats().used_pages == 0


def test_a_page_is_shared_by_equal_frames_only(folder: Path) -> None:
    """One other code, in the last codebook, is another prefix."""
    config = pipeline_config(folder, page_size=4)
    frames: tuple[Token, ...] = tuple((n % CODES, 2, 3, 4) for n in range(8))
    other = (*frames[:7], (7, 2, 3, 5))
    with running(create_engine(config)) as engine:
        cached = []
        for name, prompt in (("a", frames), ("b", frames), ("c", other)):
            last = list(ask(engine, name, (*prompt, 1)))[-1]
            cached.append(last.cached_prompt_tokens)
        assert cached == [0, 8, 4]


@pytest.mark.parametrize(
    ("prompt", "values", "message"),
    [
        ((1, (1, 2, 3)), {}, f"prompt token 1 is not a text id below {TEXT_IDS} or 4 codes below"),
        (((1, 2, 3, CODES),), {}, f"prompt token 0 is not .* or 4 codes below {CODES}"),
        ((1, TEXT_IDS), {}, "prompt token 1 is not"),
        ((1, -1), {}, "prompt token 1 is not"),
        ((1,), {"stop_token_ids": (0,)}, "stop token 0 is not 4 codes below"),
        ((1,), {"allowed_cycle": (((0, 3),),)}, "does not support allowed_cycle"),
        ((1,), {"allowed_ranges": ((0, CODES + 1),)}, "allowed ranges go beyond the vocabulary"),
    ],
)
def test_a_request_that_cannot_run_is_refused(
    engine: Engine, prompt: tuple[Token, ...], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        ask(engine, "wrong", prompt, **values)


def test_frames_are_for_models_of_frames_only(tiny_checkpoint: Path) -> None:
    engine = create_engine(pipeline_config(tiny_checkpoint))
    with pytest.raises(RequestError, match="a prompt id is not in the vocabulary"):
        ask(engine, "a", (1, (2, 3)))
    engine.shutdown()


def depth(**values: object) -> dict[str, object]:
    return {"depth_decoder_config": DEPTH | values}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (depth(num_codebooks=3), r"depth_decoder_config.num_codebooks=3 does not fit .* 4"),
        (depth(vocab_size=20), r"depth_decoder_config.vocab_size=20 does not fit"),
        (depth(backbone_hidden_size=8), "backbone_hidden_size=8 does not fit the backbone's 48"),
        ({"depth_decoder_config": None}, "has no 'depth_decoder_config'"),
        ({"depth_decoder_config": 3}, "depth_decoder_config must be an object"),
        ({"num_codebooks": 1}, r"num_codebooks=1 must be in \[2, 256\]"),
        ({"num_codebooks": 2**62}, r"num_codebooks=4611686018427387904 must be in"),
        ({"codebook_eos_token_id": CODES}, "codebook_eos_token_id=19 is no code"),
        ({"text_vocab_size": None}, "has no 'text_vocab_size'"),
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
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    name = "depth_decoder.codebooks_head.weight"
    save_file({name: tensors[name][:-1].contiguous()}, tmp_path / "model.safetensors")
    runner = ModelRunner(pipeline_config(tmp_path))
    with pytest.raises(CheckpointError, match=r"codebooks_head.weight' has 2 rows, 4 codebooks"):
        runner.initialize()


def test_options_that_do_not_apply_are_errors(folder: Path) -> None:
    with pytest.raises(ValueError, match="256"):
        ModelRunner(pipeline_config(folder, max_length=257))
    with pytest.raises(ConfigError, match="draft_model"):
        pipeline_config(folder, draft_model=pipeline_config(folder).model)


def test_weights_are_those_that_the_configuration_names(
    folder: Path, tmp_path: Path, expected: list[Frames]
) -> None:
    """The published repository has other weights under the usual name."""
    tensors, index = load_file(folder / "model.safetensors"), "transformers.safetensors.index.json"
    files = {name: f"transformers-{len(name) % 2}.safetensors" for name in tensors}
    for file in set(files.values()):
        own = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(own, tmp_path / file)
    (tmp_path / index).write_text(json.dumps({"weight_map": files}))
    save_file({"original": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    edit_config(tmp_path, transformers_weights=index)
    with running(create_engine(pipeline_config(tmp_path))) as engine:
        assert tokens_of(ask(engine, "a", PROMPTS[0])) == expected[0]
    edit_config(tmp_path, transformers_weights="../other.safetensors")
    with pytest.raises(CheckpointError, match="there is no transformers_weights="):
        create_engine(pipeline_config(tmp_path))
