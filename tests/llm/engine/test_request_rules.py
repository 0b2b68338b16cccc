"""Checks of requests against a model, and the stop ids that are added."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from llm.errors import RequestError
from llm.request import CodeSampling, Request, RequestRules, SamplingParams, check_switches

RULES = RequestRules(vocab_size=64, max_length=10, eos_token_ids=frozenset({0, 5}))


def request(ids: tuple[int, ...] = (1, 2), priority: int = 0, **sampling: Any) -> Request:
    return Request("a", ids, SamplingParams(**sampling), priority=priority)


@pytest.mark.parametrize(
    "taken",
    [
        request((1,) * 9),
        request((1,) * 4, min_tokens=6),
        request((0, 63)),
        request(stop_token_ids=(0, 63)),
        request(allowed_ranges=((0, 64),)),
        request(allowed_cycle=(((0, 4),), ((4, 64),))),
        request(top_logprobs=64),
        request(priority=1000),
        request(priority=-1000),
    ],
)
def test_values_at_a_limit_are_accepted(taken: Request) -> None:
    assert RULES.apply(taken).prompt_ids == taken.prompt_ids


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (request((1,) * 10), "the prompt has 10 tokens; at most 9 fit"),
        (
            request((1,) * 4, min_tokens=7),
            "the prompt has 4 tokens and min_tokens is 7; together at most 10 fit",
        ),
        (request((1, 64)), "a prompt id is not in the vocabulary of 64"),
        (request((-1, 1)), "a prompt id is not in the vocabulary of 64"),
        (request(later_codes=CodeSampling()), "later_codes is for models of frames"),
        (request(frame_texts=(1,)), "frame_texts is for models whose frames have a text id"),
        (request(stop_token_ids=(64,)), "a stop id is not in the vocabulary of 64"),
        (request(stop_token_ids=(-1,)), "a stop id is not in the vocabulary of 64"),
        (request(allowed_ranges=((0, 65),)), "allowed ranges go beyond the vocabulary of 64"),
        (
            request(allowed_cycle=(((0, 4),), ((4, 65),))),
            "allowed ranges go beyond the vocabulary of 64",
        ),
        (request(top_logprobs=65), "top_logprobs exceeds the vocabulary of 64"),
        (request(priority=1001), "priority must be within ±1000"),
        (request(priority=-1001), "priority must be within ±1000"),
    ],
)
def test_values_beyond_a_limit_are_refused(refused: Request, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        RULES.apply(refused)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("sampling", "stops"),
    [
        ({}, (0, 5)),
        ({"stop_token_ids": (9, 5)}, (9, 5, 0)),
        ({"stop_token_ids": (5, 0)}, (5, 0)),
        ({"allowed_ranges": ((3, 6),)}, (5,)),
        ({"allowed_ranges": ((0, 5),)}, (0,)),
        ({"allowed_ranges": ((1, 5), (6, 9))}, ()),
        ({"allowed_cycle": (((5, 6),), ((0, 1),))}, (0, 5)),
    ],
)
def test_the_models_stop_ids_are_added_where_they_may_be_sampled(
    sampling: dict[str, Any], stops: tuple[int, ...]
) -> None:
    assert RULES.apply(request(**sampling)).sampling.stop_token_ids == stops


def test_rules_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        RULES.max_length = 11  # type: ignore[misc]


@pytest.mark.parametrize(
    "asked", [{"repetition_penalty": 1.1}, {"frequency_penalty": 0.1}, {"presence_penalty": 0.1}]
)
def test_penalties_can_be_switched_off(asked: dict[str, float]) -> None:
    check_switches(request(**asked), penalties=True, min_tokens=False)
    with pytest.raises(RequestError, match="penalties are switched off"):
        check_switches(request(**asked), penalties=False, min_tokens=True)


def test_minimum_lengths_can_be_switched_off() -> None:
    check_switches(request(min_tokens=1), penalties=False, min_tokens=True)
    check_switches(request(), penalties=False, min_tokens=False)
    with pytest.raises(RequestError, match="minimum lengths are switched off"):
        check_switches(request(min_tokens=1), penalties=True, min_tokens=False)
