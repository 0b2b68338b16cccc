"""Conversion of TextService messages to values and back: bounds and defaults."""

from __future__ import annotations

from typing import Any

import pytest

from llm import SamplingParams, TokenLogprob
from tts.errors import InvalidRequestError
from tts.factory import TextModel
from tts.server.wire.common import Violations
from tts.server.wire.text import (
    MAX_MESSAGES,
    check_config,
    check_embed,
    check_input,
    read_text_sampling,
    to_logprobs,
)
from tts.v1 import common_pb2, text_pb2


def wrong_text_fields(**values: Any) -> list[str]:
    """Return the refused fields of a generation config."""
    wrong = Violations()
    check_config(text_pb2.GenerationConfig(**values), wrong)
    return [violation.field for violation in wrong]


def wrong_inputs(most: int, **values: Any) -> list[str]:
    """Return the refused fields of an input where `most` characters are allowed."""
    wrong = Violations()
    check_input(text_pb2.GenerationInput(**values), most, wrong)
    return [violation.field for violation in wrong]


@pytest.mark.parametrize(
    ("stops", "is_taken"),
    [
        (["x"] * 16, True),
        (["x"] * 17, False),
        (["x" * 1000], True),
        (["x" * 1001], False),
        (["x", ""], False),
    ],
)
def test_stop_strings_have_limits(stops: list[str], is_taken: bool) -> None:
    fields = wrong_text_fields(sampling=common_pb2.SamplingParams(stop=stops))
    assert fields == ([] if is_taken else ["config.sampling.stop"])


@pytest.mark.parametrize(("count", "is_taken"), [(16, True), (17, False)])
def test_stop_ids_have_a_limit(count: int, is_taken: bool) -> None:
    fields = wrong_text_fields(sampling=common_pb2.SamplingParams(stop_token_ids=[1] * count))
    assert fields == ([] if is_taken else ["config.sampling.stop_token_ids"])


@pytest.mark.parametrize(("count", "is_taken"), [(0, True), (20, True), (21, False), (-1, False)])
def test_alternatives_have_a_limit(count: int, is_taken: bool) -> None:
    assert wrong_text_fields(top_logprobs=count) == ([] if is_taken else ["config.top_logprobs"])


def test_inputs_may_be_as_long_as_the_limit() -> None:
    user, ids = text_pb2.CHAT_ROLE_USER, text_pb2.TokenIds
    half = text_pb2.ChatMessage(role=user, content="xxxxx")
    assert wrong_inputs(10, prompt="x" * 10) == []
    assert wrong_inputs(10, prompt="x" * 11) == ["input.prompt"]
    assert wrong_inputs(10, chat=text_pb2.ChatMessages(messages=[half, half])) == []
    assert wrong_inputs(9, chat=text_pb2.ChatMessages(messages=[half, half])) == ["input.chat"]
    assert wrong_inputs(10, token_ids=ids(ids=[1] * 10)) == []
    assert wrong_inputs(10, token_ids=ids(ids=[1] * 11)) == ["input.token_ids"]


def test_a_chat_is_validated_up_to_its_limit() -> None:
    def chat(count: int, role: int) -> text_pb2.ChatMessages:
        return text_pb2.ChatMessages(messages=[text_pb2.ChatMessage(role=role)] * count)

    assert not wrong_inputs(9, chat=chat(MAX_MESSAGES, text_pb2.CHAT_ROLE_USER))
    too_long = chat(MAX_MESSAGES + 1, text_pb2.CHAT_ROLE_USER)
    assert wrong_inputs(9, chat=too_long) == ["input.chat"]
    fields = wrong_inputs(9, chat=chat(3 * MAX_MESSAGES, 77))
    assert fields[:2] == ["input.chat", "input.chat.messages[0].role"]
    assert len(fields) == 1 + MAX_MESSAGES


@pytest.mark.parametrize(
    ("texts", "fields"),
    [
        (["x"] * 256, []),
        (["x"] * 257, ["inputs"]),
        ([], ["inputs"]),
        (["x" * 10, "x"], []),
        (["x", "x" * 11, ""], ["inputs[1]", "inputs[2]"]),
        (["a\0b"], ["inputs[0]"]),
    ],
)
def test_texts_to_embed_have_limits(texts: list[str], fields: list[str]) -> None:
    try:
        check_embed(text_pb2.EmbedRequest(inputs=texts), 10)
        found = []
    except InvalidRequestError as error:
        found = [violation.field for violation in error.violations]
    assert found == fields


def asked(**values: Any) -> SamplingParams:
    """Return the sampling of a text request, for a model that stops at id 7."""
    config = text_pb2.GenerationConfig(**values)
    overrides = check_config(config, Violations())
    return read_text_sampling(config, overrides, TextModel(SamplingParams(), (7,), 4096))


def test_lengths_of_text_have_a_default() -> None:
    params = common_pb2.SamplingParams
    assert (asked().min_tokens, asked().max_tokens) == (0, 1024)
    assert asked(sampling=params(min_tokens=2000)).max_tokens == 2000
    assert asked(sampling=params(max_tokens=3)).max_tokens == 3


def test_stop_ids_are_merged_without_duplicates() -> None:
    sampling = common_pb2.SamplingParams(stop_token_ids=[9, 7, 9])
    assert asked(sampling=sampling).stop_token_ids == (7, 9)


def test_a_seed_is_64_bits_wide() -> None:
    assert asked(sampling=common_pb2.SamplingParams(seed=0)).seed == 0
    drawn = {asked().seed for _ in range(100)}
    assert len(drawn) == 100
    assert 2**63 <= max(drawn) < 2**64


def test_sampling_that_contradicts_itself_is_a_wrong_field() -> None:
    ignoring = common_pb2.SamplingParams(ignore_eos=True)
    with pytest.raises(InvalidRequestError) as caught:
        asked(json_schema="{}", sampling=ignoring)
    assert [violation.field for violation in caught.value.violations] == ["config.sampling"]


def test_echoed_text_has_log_probabilities_without_alternatives() -> None:
    assert asked().top_logprobs is None
    assert asked(echo=True).top_logprobs == 0
    assert asked(top_logprobs=2).top_logprobs == 2


def test_scored_tokens_are_sent_with_their_alternatives() -> None:
    first = TokenLogprob(3, None, ())
    second = TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.5)))
    sent = to_logprobs([first, second])
    assert [entry.token_id for entry in sent] == [3, 5]
    assert [entry.HasField("logprob") for entry in sent] == [False, True]
    assert [(top.token_id, top.logprob) for top in sent[1].top] == [(5, -0.5), (6, -1.5)]


@pytest.mark.parametrize(
    ("priority", "is_taken"), [(1000, True), (-1000, True), (1001, False), (-1001, False)]
)
def test_a_priority_has_limits(priority: int, is_taken: bool) -> None:
    assert wrong_text_fields(priority=priority) == ([] if is_taken else ["config.priority"])
