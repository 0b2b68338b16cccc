"""Conversion between messages of TextService and values, with the checks of requests."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from llm import RequestError, SamplingParams, TokenLogprob
from tts.checkpoint.chat import ChatMessage, ChatRole
from tts.errors import InvalidRequestError
from tts.factory import TextModel
from tts.families.prompt import PromptBuilder
from tts.server.wire.common import Violations, given_sampling
from tts.speech.types import MAX_PRIORITY, overridden, sampling_violations
from tts.text.clean import control_fault
from tts.v1 import text_pb2 as pb

DEFAULT_MAX_TOKENS = 1024
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1000
MAX_TOP_LOGPROBS = 20
MAX_EMBED_INPUTS = 256
MAX_MESSAGES = 4096  # per chat
TEMPLATE_CHARACTERS = 50  # that the template adds to a message

ROLES: Mapping[int, ChatRole] = {
    pb.CHAT_ROLE_SYSTEM: ChatRole.SYSTEM,
    pb.CHAT_ROLE_USER: ChatRole.USER,
    pb.CHAT_ROLE_ASSISTANT: ChatRole.ASSISTANT,
}


def check_input(proto: pb.GenerationInput, most: int, wrong: Violations) -> list[str]:
    """Check the input, which has at most `most` characters or tokens; return its texts."""
    kind = proto.WhichOneof("input")
    wrong.require(kind is not None, "input", "must have a prompt, chat or token_ids")
    messages = proto.chat.messages
    texts = [proto.prompt, *(message.content for message in messages)]
    length = sum(map(len, texts))
    wrong.require(length <= most, f"input.{kind}", f"is longer than {most} characters")
    most_ids = f"has more than {most} tokens"
    wrong.require(len(proto.token_ids.ids) <= most, "input.token_ids", most_ids)
    if fault := control_fault(proto.prompt):
        wrong.require(False, "input.prompt", fault)
    wrong.require(
        len(messages) <= MAX_MESSAGES, "input.chat", f"has more than {MAX_MESSAGES} messages"
    )
    for index, message in enumerate(messages[:MAX_MESSAGES]):
        path = f"input.chat.messages[{index}]"
        known = message.role in ROLES
        wrong.require(known, f"{path}.role", f"{message.role} is not a known value")
        if fault := control_fault(message.content):
            wrong.require(False, f"{path}.content", fault)
    return texts


def check_config(config: pb.GenerationConfig, wrong: Violations) -> dict[str, Any]:
    """Check the fields of a config; return the sampling parameters that it gives."""
    given = given_sampling(config.sampling)
    wrong += sampling_violations(given, "config.sampling")
    stops = config.sampling.stop
    wrong.require(
        len(stops) <= MAX_STOPS and all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops),
        "config.sampling.stop",
        f"must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters",
    )
    few = len(config.sampling.stop_token_ids) <= MAX_STOPS
    wrong.require(few, "config.sampling.stop_token_ids", f"must be at most {MAX_STOPS} ids")
    most = MAX_TOP_LOGPROBS
    wrong.require(
        0 <= config.top_logprobs <= most, "config.top_logprobs", f"must be in [0, {most}]"
    )
    wrong.require(
        abs(config.priority) <= MAX_PRIORITY, "config.priority", f"must be in ±{MAX_PRIORITY}"
    )
    return given


def check_embed(request: pb.EmbedRequest, max_characters: int) -> None:
    """Raise InvalidRequestError with every invalid field."""
    with Violations() as wrong:
        if request.request_id:
            wrong.request_id(request.request_id, "request_id")
        most = MAX_EMBED_INPUTS
        wrong.require(0 < len(request.inputs) <= most, "inputs", f"must be 1 to {most} texts")
        for index, text in enumerate(request.inputs[:most]):
            field = f"inputs[{index}]"
            if fault := control_fault(text):
                wrong.require(False, field, fault)
            fits = 0 < len(text) <= max_characters
            wrong.require(fits, field, f"must have 1 to {max_characters} characters")


def prompt_ids(proto: pb.GenerationInput, prompts: PromptBuilder) -> tuple[int, ...]:
    """Return the prompt's token ids. Raises InvalidRequestError for an empty input."""
    kind = proto.WhichOneof("input")
    if kind == "prompt":
        return prompts.text_prompt(proto.prompt)
    if kind == "chat":
        return prompts.chat_prompt(
            [ChatMessage(ROLES[m.role], m.content) for m in proto.chat.messages]
        )
    if not proto.token_ids.ids:
        raise InvalidRequestError.of("input.token_ids", "there are no tokens")
    return tuple(proto.token_ids.ids)


def read_text_sampling(
    config: pb.GenerationConfig, given: Mapping[str, Any], model: TextModel
) -> SamplingParams:
    """Return the sampling parameters: those `given` in the config, else the model's defaults."""
    min_tokens = given.get("min_tokens", 0)
    try:
        return replace(
            overridden(model.sampling, given),
            seed=given["seed"] if "seed" in given else secrets.randbits(64),
            min_tokens=min_tokens,
            max_tokens=given.get("max_tokens", max(DEFAULT_MAX_TOKENS, min_tokens)),
            stop_token_ids=tuple(
                dict.fromkeys((*model.stop_token_ids, *config.sampling.stop_token_ids))
            ),
            ignore_eos=config.sampling.ignore_eos,
            top_logprobs=config.top_logprobs or (0 if config.echo or config.logprobs else None),
            echo=config.echo,
            json_schema=config.json_schema,
        )
    except RequestError as error:
        raise InvalidRequestError.of("config.sampling", str(error)) from error


def to_logprobs(entries: Iterable[TokenLogprob]) -> list[pb.TokenLogprob]:
    """Return the messages of scored tokens."""
    return [
        pb.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top=[pb.TopLogprob(token_id=i, logprob=value) for i, value in entry.top],
        )
        for entry in entries
    ]
