"""The one table from the JSON of text requests to the messages of the wire contract."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from tts.errors import FieldViolation, InvalidRequestError
from tts.factory import Service
from tts.http.exchange import Items, JsonBody, JsonPart
from tts.http.speech_body import NAMES as SPEECH_NAMES
from tts.http.speech_body import SpeechFormat, SpeechNames, VoiceSettings, to_synthesis
from tts.server.wire.text import MAX_MESSAGES
from tts.v1 import common_pb2, speech_pb2
from tts.v1 import text_pb2 as pb

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Modality = Literal["text", "audio"]
Part = TypeVar("Part")
Parts = Annotated[list[Part], Field(max_length=MAX_MESSAGES, fail_fast=True)]
"""Messages of a chat, or parts of a message: 80,000 of them take a second."""

JSON_OBJECT = '{"type": "object"}'
"""Schema of `response_format` json_object."""

ROLES: Mapping[str, pb.ChatRole] = {
    "system": pb.CHAT_ROLE_SYSTEM,
    "developer": pb.CHAT_ROLE_SYSTEM,  # OpenAI's newer name
    "user": pb.CHAT_ROLE_USER,
    "assistant": pb.CHAT_ROLE_ASSISTANT,
}

SAMPLING = [
    field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields if field.name != "stop"
]
"""Sampling parameters, which have the same names and values in JSON and in the contract."""

_NO_TOOLS = "tools are not supported; leave it out"

REFUSED: Mapping[str, tuple[Sequence[Any], str]] = {
    "n": ((1,), "must be 1; send several requests, which run at once"),
    "best_of": ((1,), "must be 1"),
    "echo": ((False,), "is not supported; put the prompt in front of the text"),
    "suffix": (("",), "is not supported"),
    "logit_bias": (({},), "is not supported"),
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "function_call": (("none", "auto"), _NO_TOOLS),
    "modalities": ((["text"],), "must be text; /v1/chat/completions speaks"),
    "audio": ((), "is not supported; /v1/chat/completions speaks"),
    "web_search_options": ((), "is not supported"),
    "dimensions": ((), "is not supported: the vectors of a model have one size"),
}
"""Fields of OpenAI that are not supported, with the values that ask for nothing."""

_NAMES: Mapping[str, str] = {
    "config.model": "model",
    "config.json_schema": "response_format",
    "config.priority": "priority",
    "config.sampling": "",
    **{f"config.sampling.{name}": name for name in (*SAMPLING, "stop")},
}
CHAT_NAMES = {
    **_NAMES,
    "config.top_logprobs": "top_logprobs",
    "input": "messages",
    **{
        path.replace("config.", "synthesis.", 1): f"audio.{name}"
        for path, name in SPEECH_NAMES.items()
        if path.startswith("config.")
    },
    "synthesis.audio_format": "audio.format",
    "ref_audio": "audio.ref_audio",
    "ref_text": "audio.ref_text",
}
COMPLETION_NAMES = {**_NAMES, "config.top_logprobs": "logprobs", "input": "prompt"}
EMBEDDING_NAMES = {"inputs": "input"}
"""Fields of the contract by their names in JSON, for errors."""


class StreamOptions(JsonPart):
    """Options of a stream."""

    include_usage: bool = False


class NamedSchema(JsonPart):
    """JSON schema of a response."""

    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(JsonPart):
    """Format of the text that is written."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class ContentPart(JsonPart):
    """Part of a message: a text, or a kind that is refused."""

    type: str
    text: str = ""


class Message(JsonPart):
    """One turn of a conversation."""

    role: str
    content: str | Parts[ContentPart] | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class TextBody(JsonBody):
    """JSON that all text requests share."""

    model: str = ""

    def refuse_unsupported(self) -> None:
        """Raise InvalidRequestError for fields of OpenAI that would change the response."""
        wrong = [
            FieldViolation(name, REFUSED[name][1])
            for name, value in (self.model_extra or {}).items()
            if name in REFUSED and value not in REFUSED[name][0]
        ]
        if wrong:
            raise InvalidRequestError(*wrong)

    @property
    def ignored(self) -> list[str]:
        """Return the names of fields that have no effect."""
        return [name for name in self.model_extra or () if name not in REFUSED]


class GenerationBody(TextBody):
    """JSON that chats and completions share: OpenAI's fields, then ours."""

    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    stop: str | Items[str] = Field(default=[])
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_window: Int32 | None = None
    min_tokens: Int32 | None = None
    stop_token_ids: Items[Int32] = Field(default=[])
    ignore_eos: bool = False
    priority: Int32 = 0

    @property
    def includes_usage(self) -> bool:
        """Return whether a stream ends with an event of its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


AUDIO_FORMATS: Mapping[str, SpeechFormat] = {
    "mp3": "mp3",
    "opus": "opus",
    "flac": "flac",
    "wav": "wav",
    "pcm16": "pcm",
}
"""`format` of a chat's audio to `response_format` of speech."""


class ChatAudio(VoiceSettings):
    """JSON of how the text of a chat is spoken."""

    format: Literal["mp3", "opus", "flac", "wav", "pcm16"] = "wav"

    def synthesis(self, names: SpeechNames) -> speech_pb2.SynthesisConfig:
        """Return the message of the wire contract; raises as `to_request` does."""
        return to_synthesis(self, AUDIO_FORMATS[self.format], names)


class ChatBody(GenerationBody):
    """JSON of a chat."""

    messages: Parts[Message]
    modalities: Items[Modality] = Field(default=["text"], min_length=1)
    audio: ChatAudio | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Int32 = 0

    @property
    def spoken(self) -> ChatAudio | None:
        """Return how the text is spoken; None for a text that is not."""
        return (self.audio or ChatAudio()) if "audio" in self.modalities else None


class CompletionBody(GenerationBody):
    """JSON of a prompt to continue: a text or token ids, alone or as the only item of a list."""

    prompt: str | Items[Int32] | Items[str] | Items[Items[Int32]]
    logprobs: Int32 | None = None


class EmbeddingBody(TextBody):
    """JSON of texts to embed."""

    input: str | Items[str] | Items[Int32] | Items[Items[Int32]]
    encoding_format: Literal["float", "base64"] = "float"


def chat_request(body: ChatBody, service: Service) -> pb.GenerateRequest:
    """Return the message of the wire contract for a chat. Raises InvalidRequestError."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError.of("top_logprobs", "needs logprobs: true")
    if body.audio is not None and body.spoken is None:
        raise InvalidRequestError.of("audio", "needs modalities: text and audio")
    messages = [_message(index, message) for index, message in enumerate(body.messages)]
    config = _config(body, service)
    config.logprobs, config.top_logprobs = body.logprobs, body.top_logprobs
    if body.max_completion_tokens is not None:  # the newer name
        config.sampling.max_tokens = body.max_completion_tokens
    chat = pb.ChatMessages(messages=messages)
    return pb.GenerateRequest(config=config, input=pb.GenerationInput(chat=chat))


def completion_request(body: CompletionBody, service: Service) -> pb.GenerateRequest:
    """Return the message of the wire contract for a completion. Raises InvalidRequestError."""
    config = _config(body, service)
    if body.logprobs is not None:
        config.logprobs, config.top_logprobs = True, body.logprobs
    return pb.GenerateRequest(config=config, input=_prompt(body.prompt))


def embed_request(body: EmbeddingBody, service: Service) -> pb.EmbedRequest:
    """Return the message of the wire contract for embeddings. Raises InvalidRequestError."""
    inputs = [body.input] if isinstance(body.input, str) else body.input
    texts = [item for item in inputs if isinstance(item, str)]
    if len(texts) < len(inputs):
        raise InvalidRequestError.of("input", "must be texts; token ids are not supported")
    model, lora = _model_and_adapter(body.model, service)
    return pb.EmbedRequest(inputs=texts, model=model, lora=lora)


def _config(body: GenerationBody, service: Service) -> pb.GenerationConfig:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError.of("stream_options", "needs stream: true")
    model, lora = _model_and_adapter(body.model, service)
    sampling = {name: getattr(body, name) for name in SAMPLING}
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    return pb.GenerationConfig(
        model=model,
        lora=lora,
        sampling=common_pb2.SamplingParams(**sampling, stop=stops),
        json_schema=_schema(body.response_format),
        priority=body.priority,
    )


def _model_and_adapter(name: str, service: Service) -> tuple[str, str]:
    """Return the model and the adapter that a name selects; "" for the served model."""
    is_adapter = name != service.model and name in service.text.adapters
    return ("", name) if is_adapter else (name, "")


def _schema(wanted: ResponseFormat | None) -> str:
    if wanted is None or wanted.type == "text":
        return ""
    if wanted.type == "json_object":
        return JSON_OBJECT
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidRequestError.of("response_format", "needs json_schema with a schema")
    return json.dumps(wanted.json_schema.schema_, ensure_ascii=False)


def _message(index: int, message: Message) -> pb.ChatMessage:
    field = f"messages[{index}]"
    if message.tool_calls or message.function_call:
        raise InvalidRequestError.of(f"{field}.tool_calls", "tools are not supported")
    if message.role not in ROLES:
        raise InvalidRequestError.of(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    if message.content is None:
        raise InvalidRequestError.of(f"{field}.content", "must be a text")
    return pb.ChatMessage(role=ROLES[message.role], content=_text(message.content, field))


def _text(content: str | list[ContentPart], field: str) -> str:
    """Return a message's text; its parts become lines."""
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text":
            path = f"{field}.content[{index}].type"
            raise InvalidRequestError.of(path, "must be text; the model reads nothing else")
    return "\n".join(part.text for part in content)


def _prompt(prompt: str | Sequence[int | str | list[int]]) -> pb.GenerationInput:
    if not isinstance(prompt, str) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return pb.GenerationInput(prompt=prompt)
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) < len(prompt):
        raise InvalidRequestError.of("prompt", "must be one prompt; send several requests")
    return pb.GenerationInput(token_ids=pb.TokenIds(ids=ids))
