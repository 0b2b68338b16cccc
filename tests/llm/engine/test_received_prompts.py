"""Prompts that one engine computes and another one continues, without a service between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llm import PipelineRole
from llm.batch import ForwardMode
from llm.config import PipelineConfig
from llm.engine.engine import Engine, TokenStream, create_engine
from llm.errors import RequestError
from llm.kv_cache.transfer import PageTransfer
from llm.memory.shared_file import SharedFile
from llm.request import FinishReason, Request, SamplingParams, TokenChunk
from llm.sequence import ReceivedPrompt

pytestmark = pytest.mark.skipif(not SharedFile.is_available(), reason="needs files in memory")

WAIT_S = 60


@contextmanager
def running(checkpoint: Path, role: PipelineRole, **values: Any) -> Iterator[Engine]:
    cache = {"kv_cache_page_size": 16, "num_pages": values.pop("num_pages", 128)}
    model = {"model_path": str(checkpoint), "kv_cache": cache}
    bases = ["ipc:///unused"] if role is PipelineRole.DecodeOnly else []
    config = PipelineConfig(
        model=model,
        pipeline_role=role,
        prefill_endpoints=bases,
        max_batch_size=8,
        max_length=200,
        kvcache_ce_watermark=1.0,
        **values,
    )
    engine = create_engine(config)
    engine.start()
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def prefill(text_checkpoint: Path) -> Iterator[Engine]:
    with running(text_checkpoint, PipelineRole.PrefillOnly) as engine:
        yield engine


def transfer_of(engine: Engine) -> PageTransfer:
    assert engine.transfer is not None
    return engine.transfer


def requests(count: int = 2, length: int = 60, max_tokens: int = 60) -> list[Request]:
    return [
        Request(
            f"r{number}",
            tuple((number * 37 + place * 11) % 200 for place in range(length + number)),
            SamplingParams(
                seed=number,
                temperature=0.8 * (number % 2),
                max_tokens=max_tokens,
                ignore_eos=True,
                repetition_penalty=1.2,
            ),
        )
        for number in range(count)
    ]


def received(prefill: Engine, decode: Engine, request: Request) -> ReceivedPrompt:
    """Have a prompt computed by one engine and written into the pool of the other one."""
    one, other = transfer_of(prefill), transfer_of(decode)
    single = replace(request, sampling=replace(request.sampling, max_tokens=1))
    (chunk,) = prefill.submit(single, kept_as="kept")
    sent = prefill.run_on_engine(lambda: one.kept("kept", single)).result(WAIT_S)
    name = f"claim of {request.request_id}"
    claim = decode.run_on_engine(lambda: other.claim(name, request)).result(WAIT_S)
    handle = other.share()
    assert claim is not None
    assert handle is not None
    missing = claim.pages[claim.num_cached :]
    one.write_to(one.open_peer(handle), missing, sent.pages[claim.num_cached :])
    prefill.run_on_engine(lambda: one.release(sent)).result(WAIT_S)
    return other.received(claim, len(missing), chunk.token_ids[0])


def tokens_of(stream: TokenStream) -> tuple[list[Any], TokenChunk]:
    chunks = list(stream)
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1]


def check_released(engine: Engine) -> None:
    kv = engine.pipeline.kv_manager

    def check() -> None:
        kv.check_integrity()
        assert (kv.num_claims, kv.num_transfers, kv.used_pages) == (0, 0, 0)

    engine.run_on_engine(check).result(WAIT_S)


@pytest.mark.parametrize("with_token", [True, False])
@pytest.mark.parametrize("num_pages", [128, 13])
def test_tokens_are_those_of_one_engine(
    text_checkpoint: Path, prefill: Engine, num_pages: int, with_token: bool
) -> None:
    """Also when a sequence is preempted and its prompt computed again."""
    with running(text_checkpoint, PipelineRole.PrefillAndDecode) as plain:
        expected = [tokens_of(plain.submit(request))[0] for request in requests()]
    with running(text_checkpoint, PipelineRole.DecodeOnly, num_pages=num_pages) as decode:
        streams, firsts = [], []
        for request in requests():
            prompt = received(prefill, decode, request)
            if not with_token:
                prompt = replace(prompt, token=None, num_tokens=prompt.num_tokens - 1)
            firsts.append([prompt.token] if with_token else [])
            streams.append(decode.submit(request, received=prompt))
            assert prompt.is_taken
        for first, stream, tokens in zip(firsts, streams, expected, strict=True):
            found, last = tokens_of(stream)
            assert first + found == tokens
            assert (last.finish_reason, last.output_tokens) == (FinishReason.LENGTH, 60)
            assert last.cached_prompt_tokens == last.prompt_tokens - (not with_token)
        assert (decode.stats().preemptions > 0) == (num_pages == 13)
        assert decode.stats().sequences.first_token_s.count == 2
        modes = {batch.mode for batch in decode.stats().batches if batch.rows.count}
        assert (modes == {ForwardMode.DECODE}) == (with_token and num_pages == 128)
        check_released(decode)
    check_released(prefill)


def test_no_more_decode_than_may(text_checkpoint: Path, prefill: Engine) -> None:
    with running(text_checkpoint, PipelineRole.PrefillAndDecode) as plain:
        expected = [tokens_of(plain.submit(request))[0] for request in requests(4)]
    with running(text_checkpoint, PipelineRole.DecodeOnly, max_queue_size_tg=2) as decode:
        prompts = [received(prefill, decode, request) for request in requests(4)]
        pairs = zip(requests(4), prompts, strict=True)
        streams = [decode.submit(request, received=prompt) for request, prompt in pairs]
        for prompt, stream, tokens in zip(prompts, streams, expected, strict=True):
            assert [prompt.token, *tokens_of(stream)[0]] == tokens
        for batch in decode.stats().batches:
            assert batch.rows.bounds[:2] == (1, 2)
            assert not any(batch.rows.counts[2:])
        check_released(decode)


def test_a_token_that_is_the_last_ends_the_request(text_checkpoint: Path, prefill: Engine) -> None:
    (request,) = requests(count=1, max_tokens=1)
    with running(text_checkpoint, PipelineRole.DecodeOnly) as decode:
        prompt = received(prefill, decode, request)
        found, last = tokens_of(decode.submit(request, received=prompt))
        assert not found, "its caller has it"
        assert (last.finish_reason, last.output_tokens) == (FinishReason.LENGTH, 1)
        check_released(decode)


def test_cancelled_and_refused_requests_leave_no_pages(
    text_checkpoint: Path, prefill: Engine
) -> None:
    (request,) = requests(count=1)
    with running(text_checkpoint, PipelineRole.DecodeOnly) as decode:
        prompt = received(prefill, decode, request)
        stream = decode.submit(request, received=prompt)
        stream.cancel()
        assert tokens_of(stream)[1].finish_reason is FinishReason.CANCELLED
        check_released(decode)
        prompt = received(prefill, decode, replace(request, cache_salt="other"))
        with pytest.raises(RequestError):
            decode.submit(replace(request, prompt_ids=(10**6,)), received=prompt)
        assert not prompt.is_taken
        kv = decode.pipeline.kv_manager
        decode.run_on_engine(lambda: kv.release(prompt.name)).result(WAIT_S)
        check_released(decode)
    long = replace(request, sampling=replace(request.sampling, max_tokens=100))
    stream = prefill.submit(long, kept_as="never")
    stream.cancel()
    assert tokens_of(stream)[1].finish_reason is FinishReason.CANCELLED
    check_released(prefill)
