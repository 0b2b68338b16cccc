"""Messages of TextService to values and back; what is wrong with one is found here."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace

from llm import RequestError, SamplingParams, TokenLogprob
from tts.chat import ChatMessage, ChatRole
from tts.errors import InvalidRequestError
from tts.factory import TextModel
from tts.prompt import PromptBuilder
from tts.proto_checks import Violations, read_sampling
from tts.speech import MAX_PRIORITY
from tts.text import TextError, check_text
from tts.v1 import text_pb2 as pb

DEFAULT_MAX_TOKENS = 1024
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1000
MAX_TOP_LOGPROBS = 20
MAX_EMBED_INPUTS = 256
MAX_MESSAGES = 4096  # of a chat
TEMPLATE_CHARACTERS = 50  # around one of them

ROLES: Mapping[int, ChatRole] = {
    pb.CHAT_ROLE_SYSTEM: ChatRole.SYSTEM,
    pb.CHAT_ROLE_USER: ChatRole.USER,
    pb.CHAT_ROLE_ASSISTANT: ChatRole.ASSISTANT,
}


def check_input(proto: pb.GenerationInput, most: int, wrong: Violations) -> None:
    """What there is to go on from: at most so many characters, or tokens."""
    kind = proto.WhichOneof("input")
    wrong.require(kind is not None, "input", "holds neither prompt, chat nor token_ids")
    length = _num_characters(proto)
    wrong.require(length <= most, f"input.{kind}", f"is longer than {most} characters")
    most_ids = f"has more than {most} tokens"
    wrong.require(len(proto.token_ids.ids) <= most, "input.token_ids", most_ids)
    if kind == "prompt":
        _check_characters(proto.prompt, "input.prompt", wrong)
    messages = proto.chat.messages
    wrong.require(
        len(messages) <= MAX_MESSAGES, "input.chat", f"has more than {MAX_MESSAGES} messages"
    )
    for index, message in enumerate(messages[:MAX_MESSAGES]):
        path = f"input.chat.messages[{index}]"
        wrong.one_of(message.role, ROLES, f"{path}.role")
        _check_characters(message.content, f"{path}.content", wrong)


def check_config(config: pb.GenerationConfig, wrong: Violations) -> None:
    """What is wrong with a config by itself."""
    wrong.found += read_sampling(config.sampling).violations()
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


def check_embed(request: pb.EmbedRequest, max_characters: int) -> None:
    """Raise InvalidRequestError naming every wrong field."""
    with Violations() as wrong:
        wrong.request_id(request.request_id, "request_id")
        most = MAX_EMBED_INPUTS
        wrong.require(0 < len(request.inputs) <= most, "inputs", f"must be 1 to {most} texts")
        for index, text in enumerate(request.inputs[:most]):
            field = f"inputs[{index}]"
            _check_characters(text, field, wrong)
            fits = 0 < len(text) <= max_characters
            wrong.require(fits, field, f"must have 1 to {max_characters} characters")


def _check_characters(text: str, field: str, wrong: Violations) -> None:
    try:
        check_text(text)
    except TextError as error:
        wrong.require(False, field, error.violations[0].description)


def length_of(proto: pb.GenerationInput) -> int:
    """How much there is to encode: characters, with those that a template puts around messages."""
    return _num_characters(proto) + TEMPLATE_CHARACTERS * len(proto.chat.messages)


def _num_characters(proto: pb.GenerationInput) -> int:
    return sum(map(len, input_texts(proto)))


def input_texts(proto: pb.GenerationInput) -> list[str]:
    """The texts a client asks to go on from."""
    return [proto.prompt, *(message.content for message in proto.chat.messages)]


def prompt_ids(proto: pb.GenerationInput, prompts: PromptBuilder) -> tuple[int, ...]:
    """What the model goes on from. Raises InvalidRequestError for an input that is empty."""
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


def read_text_sampling(config: pb.GenerationConfig, model: TextModel) -> SamplingParams:
    """How tokens are chosen: as asked, else as the model recommends."""
    asked = read_sampling(config.sampling)
    min_tokens = asked.min_tokens or 0
    try:
        return replace(
            asked.over(model.sampling),
            seed=secrets.randbits(64) if asked.seed is None else asked.seed,
            min_tokens=min_tokens,
            max_tokens=asked.max_tokens or max(DEFAULT_MAX_TOKENS, min_tokens),
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
    """Scored tokens as they are sent."""
    return [
        pb.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            top=[pb.TopLogprob(token_id=i, logprob=value) for i, value in entry.top],
        )
        for entry in entries
    ]
