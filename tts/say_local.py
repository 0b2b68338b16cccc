"""The voice in this process: `SpeechApi` without a network, for `SpeechClient`'s callers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from decoder import DecoderConfigError, DecoderError
from llm import CheckpointError, ConfigError, FinishReason, LLMError, SamplingParams
from tts.chat import ChatMessage, ChatRole
from tts.config import AudioGenerationConfig, ServerConfig, describe_error, load_config
from tts.errors import TTSError
from tts.factory import Service, create_service
from tts.model_values import complete_values
from tts.proto_events import to_voice
from tts.say_client import SayError, endless_answer
from tts.say_options import MAX_REFERENCE_BYTES, ModelChoice, UsageError
from tts.speech_api import SpeechApi
from tts.status import rule_of
from tts.text_generator import TextGenerator, TextRequest
from tts.utterance import closing
from tts.v1 import speech_pb2

UNLIMITED = 2**31 - 1
MOST_AT_ONCE = 8  # sentences

LIMITS = ServerConfig(
    max_text_characters=UNLIMITED,
    max_stream_characters=UNLIMITED,
    max_prompt_audio_bytes=MAX_REFERENCE_BYTES,
    max_audio_duration_s=float(UNLIMITED),
    idle_timeout_s=float(UNLIMITED),
)
"""A user's own machine reads as much as its user wants."""


class LocalClient:
    """Loads the model when it is made. Raises SayError, or UsageError for a bad checkpoint."""

    def __init__(self, model: ModelChoice) -> None:
        with _errors():
            self._service = _load(model)
        self._api = SpeechApi(self._service.synthesizer, LIMITS)

    async def synthesize(
        self, request: speech_pb2.SynthesizeStreamRequest
    ) -> AsyncGenerator[speech_pb2.SynthesizeStreamResponse, None]:
        with _errors():
            async with closing(self._api.stream(self._api.check(request))) as events:
                async for event in events:
                    yield event

    async def converse(
        self,
        config: speech_pb2.StreamingSynthesizeConfig,
        fragments: AsyncIterator[str],
    ) -> AsyncGenerator[speech_pb2.StreamingSynthesizeResponse, None]:
        async def messages() -> AsyncIterator[speech_pb2.StreamingSynthesizeRequest]:
            async for text in fragments:
                yield speech_pb2.StreamingSynthesizeRequest(text=text)

        first = speech_pb2.StreamingSynthesizeRequest(config=config)
        with _errors():
            checked = self._api.check_session(first)
            async with closing(self._api.converse(checked, messages())) as events:
                async for event in events:
                    yield event

    async def voices(self, language_code: str) -> Sequence[speech_pb2.Voice]:
        with _errors():
            found = self._api.synthesizer.voices.voices(language_code)
        return [to_voice(voice, self._service.model) for voice in found]

    async def answer(self, message: str, max_tokens: int) -> AsyncGenerator[str, None]:
        service = self._service
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, stop_token_ids=service.text.stop_token_ids
        )
        with _errors():
            prompt = service.prompts.chat_prompt([ChatMessage(ChatRole.USER, message)])
            request = TextRequest("say", prompt, sampling)
            writer = TextGenerator(service.client, service.prompts)
            async with closing(writer.write(request)) as pieces:
                async for piece in pieces:
                    yield piece.text
                    if piece.finish_reason is FinishReason.LENGTH:
                        raise endless_answer()

    async def close(self) -> None:
        await self._service.client.close()


def _load(model: ModelChoice) -> Service:
    try:
        config = load_config(AudioGenerationConfig, _values(model), base=_complete)
        return create_service(config, LIMITS)
    except ValidationError as error:
        raise UsageError(describe_error(error)) from error
    except (CheckpointError, ConfigError, DecoderConfigError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error


def _complete(values: dict[str, Any]) -> dict[str, Any]:
    """As for a server, but that one speaker needs no preparation for hundreds."""
    return AudioGenerationConfig.merged({"max_batch_size": MOST_AT_ONCE}, complete_values(values))


def _values(model: ModelChoice) -> dict[str, Any]:
    """What was asked for, as configuration values; the rest is left to the other layers."""
    if not model.name:
        return {}
    section = {"model_path": model.name, "huggingface_revision": model.revision or "main"}
    others = {
        "family": model.family,
        "audio_decoder": model.audio_decoder,
        "offline": model.offline,
        "allow_pickle": model.allow_pickle,
    }
    return {"model": section, **{name: value for name, value in others.items() if value}}


@contextmanager
def _errors() -> Iterator[None]:
    """What the service raises on purpose becomes the one error of clients."""
    try:
        yield
    except (TTSError, LLMError, DecoderError) as error:
        raise SayError(rule_of(type(error)).code, str(error)) from error
