"""Text from tokens: the text does not depend on how the engine bundles the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm import (
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
)
from tests.fakes import wait_until_idle
from tts.engine.client import Hold
from tts.errors import SynthesisError
from tts.factory import Service
from tts.families.base import Checkpoint
from tts.families.prompt import PromptBuilder
from tts.textgen.generator import StopMatcher, TextGenerator, TextPiece


class Recorded:
    """An engine client that returns given chunks; only `generate` is called."""

    def __init__(self, chunks: list[TokenChunk]) -> None:
        self.chunks = chunks
        self.num_sent = 0
        self.is_closed = False

    async def generate(
        self, request: Request, hold: Hold | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        try:
            for chunk in self.chunks:
                self.num_sent += 1
                yield chunk
        finally:
            self.is_closed = True


def bundled(data: bytes, width: int) -> list[TokenChunk]:
    """One token for each byte, `width` of them in a chunk, ended by the limit."""
    chunks = []
    for start in range(0, len(data), width):
        ids = tuple(data[start : start + width])
        scores = tuple(TokenLogprob(token, -1.0) for token in ids)
        chunks.append(TokenChunk("r", ids, scores, output_tokens=start + len(ids)))
    chunks[-1] = chunks[-1]._replace(finish_reason=FinishReason.LENGTH)
    return chunks


@pytest.fixture(scope="module")
def prompts(tiny_checkpoint: Path) -> PromptBuilder:
    return PromptBuilder(Checkpoint(tiny_checkpoint))


def write(
    prompts: PromptBuilder, client: Recorded, stops: tuple[str, ...] = (), min_tokens: int = 0
) -> list[TextPiece]:
    request = Request("r", (1,), SamplingParams(min_tokens=min_tokens))

    async def read() -> list[TextPiece]:
        generator = TextGenerator(client, prompts)  # type: ignore[arg-type]
        return [piece async for piece in generator.write(request, stops)]

    return asyncio.run(read())


def summary(pieces: list[TextPiece]) -> tuple[str, list[int], int, FinishReason | None]:
    ids = [token for piece in pieces for token in piece.token_ids]
    assert len(ids) == sum(len(piece.logprobs) for piece in pieces)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    last = pieces[-1]
    return "".join(piece.text for piece in pieces), ids, last.output_tokens, last.finish_reason


@given(
    text=st.text(alphabet="ab€🙂 ", min_size=1, max_size=30),
    stops=st.lists(st.text(alphabet="ab€🙂", min_size=1, max_size=3), max_size=3).map(tuple),
    min_tokens=st.integers(0, 12),
)
@settings(max_examples=60)
def test_text_does_not_depend_on_token_bundles(
    prompts: PromptBuilder, text: str, stops: tuple[str, ...], min_tokens: int
) -> None:
    data = text.encode()
    found = [
        summary(write(prompts, Recorded(bundled(data, width)), stops, min_tokens))
        for width in (1, 2, 5, len(data))
    ]
    assert found.count(found[0]) == 4
    kept, ids, num_tokens, reason = found[0]
    assert text.startswith(kept)
    assert num_tokens == len(ids)
    if reason is FinishReason.LENGTH:
        assert kept == text
    else:
        assert any(bytes(ids).decode(errors="ignore").endswith(stop) for stop in stops)
        assert any(text[len(kept) :].startswith(stop) for stop in stops)
        assert len(ids) > min_tokens


@given(text=st.text(alphabet="aé€🙂\u0301", max_size=30), cut=st.integers(1, 7))
@settings(max_examples=30)
def test_no_piece_holds_half_a_character(prompts: PromptBuilder, text: str, cut: int) -> None:
    data = (text + "!").encode()
    pieces = write(prompts, Recorded(bundled(data, cut)))
    assert "".join(piece.text for piece in pieces) == text + "!"
    assert not any("\ufffd" in piece.text for piece in pieces)


def test_a_stop_string_ends_the_request_at_its_token(prompts: PromptBuilder) -> None:
    client = Recorded(bundled(b"abcd STOP and on and on", 4))
    pieces = write(prompts, client, ("STOP",))
    assert summary(pieces) == ("abcd ", list(b"abcd STOP"), 9, FinishReason.STOP)
    assert client.is_closed
    assert client.num_sent == 3


@pytest.mark.parametrize(
    ("min_tokens", "kept"),
    [
        (4, "one "),
        (5, "one STOP two "),  # the S may not stop any more, so the whole word does not
        (13, "one STOP two "),
        (14, "one STOP two STOP three"),
    ],
)
def test_stop_strings_apply_after_min_tokens(
    prompts: PromptBuilder, min_tokens: int, kept: str
) -> None:
    client = Recorded(bundled(b"one STOP two STOP three", 3))
    assert summary(write(prompts, client, ("STOP",), min_tokens))[0] == kept


def test_an_incomplete_character_at_the_end_is_replaced(prompts: PromptBuilder) -> None:
    client = Recorded(bundled("a€".encode()[:-1], 3))
    assert summary(write(prompts, client))[0] == "a\ufffd"
    stopped = write(prompts, Recorded(bundled("a€".encode()[:-1], 3)), ("\ufffd",))
    assert summary(stopped)[::3] == ("a", FinishReason.STOP)


def test_failures_of_the_engine_are_errors(prompts: PromptBuilder) -> None:
    broken = TokenChunk("r", finish_reason=FinishReason.ERROR, error="no room")
    with pytest.raises(SynthesisError, match="no room"):
        write(prompts, Recorded([*bundled(b"abc", 1)[:-1], broken]))


def test_a_stop_string_frees_the_engine(service: Service) -> None:
    async def text(max_tokens: int, *stops: str) -> str:
        sampling = SamplingParams(seed=3, max_tokens=max_tokens, ignore_eos=True)
        generator = TextGenerator(service.client, service.prompts)
        pieces = generator.write(Request("r", tuple(b"hello"), sampling), stops)
        return "".join([piece.text async for piece in pieces])

    async def num_cancelled() -> int:
        stats = (await service.client.status()).stats
        assert stats is not None
        return stats.sequences.finished[FinishReason.CANCELLED]

    async def ask() -> None:
        free, before = await text(120), await num_cancelled()
        assert len(free) > 50
        stopped = await text(900, free[3:5])
        assert stopped == free[: free.index(free[3:5])]
        await wait_until_idle(service.client)
        assert await num_cancelled() == before + 1

    asyncio.run(ask())


# --- stop strings


@pytest.mark.parametrize(
    ("stops", "text", "kept"),
    [
        (["END"], "some text END more", "some text "),
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        (["abcd", "c"], "xabcd", "xab"),
        (["ab", "b"], "xxab", "xx"),
        (["aab"], "aaaab", "aa"),
        ([], "anything", "anything"),
        (["END"], "never ends EN", "never ends EN"),
    ],
)
def test_text_ends_before_the_stop_string_for_any_split(
    stops: list[str], text: str, kept: str
) -> None:
    for width in range(1, len(text) + 1):
        matcher = StopMatcher(stops)
        sent = [matcher.push(text[i : i + width]) for i in range(0, len(text), width)]
        assert "".join([*sent, matcher.finish()]) == kept
        assert matcher.is_stopped == (kept != text)


def test_only_a_possible_stop_is_held_back() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.push(c) for c in "aSTxS"] == ["a", "", "", "STx", ""]
    assert matcher.push("o") == "So"


@pytest.mark.parametrize("stop", ["", "x" * 1001])
def test_empty_stop_strings_are_refused(stop: str) -> None:
    with pytest.raises(RequestError, match="stop strings"):
        StopMatcher([stop])
