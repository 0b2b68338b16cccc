"""`LocalClient`: the service in this process as a `SpeechClient`, without a network."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from decoder import DecoderConfigError, DecoderError
from llm import CheckpointError, ConfigError, FinishReason, LLMError, Request, SamplingParams
from tts.api.load import LIMITS, load_service
from tts.checkpoint.chat import ChatMessage, ChatRole
from tts.cli.client import ResponseTooLongError, SayError
from tts.cli.options import ModelChoice, UsageError
from tts.errors import TTSError
from tts.factory import Service
from tts.server.speech_api import SpeechApi
from tts.server.status import rule_of
from tts.server.wire.speech import to_fields, to_session_response, to_voice
from tts.textgen.generator import TextGenerator
from tts.v1 import speech_pb2


class LocalClient:
    """A service as a `SpeechClient`; see `load`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._api = SpeechApi(self._service.synthesizer, LIMITS)

    @classmethod
    def load(cls, model: ModelChoice) -> LocalClient:
        """Load a model. Raises SayError, or UsageError for a wrong checkpoint."""
        with _errors():
            return cls(load_model(model))

    async def synthesize(
        self, request: speech_pb2.SynthesizeStreamRequest
    ) -> AsyncGenerator[speech_pb2.SynthesizeStreamResponse, None]:
        with _errors():
            checked = self._api.check(request)
            async with aclosing(self._api.synthesizer.stream(checked)) as events:
                async for event in events:
                    yield speech_pb2.SynthesizeStreamResponse(**to_fields(event))

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
            checked, times = self._api.check_session(first)
            async with aclosing(self._api.converse(checked, times, messages())) as events:
                async for event in events:
                    yield to_session_response(event)

    async def model(self) -> speech_pb2.ModelInfo:
        from tts.server.speech_service import model_info  # slower to import than "hello" needs

        return model_info(self._service)

    async def has_word_times(self) -> bool:
        with _errors():
            return self._api.synthesizer.settings.aligner is not None

    async def voices(self, language_code: str) -> Sequence[speech_pb2.Voice]:
        with _errors():
            found = self._api.synthesizer.voices.voices(language_code)
        return [to_voice(voice, self._service.model) for voice in found]

    async def complete_chat(self, message: str, max_tokens: int) -> AsyncGenerator[str, None]:
        service = self._service
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, stop_token_ids=service.text.stop_token_ids
        )
        with _errors():
            prompt = service.prompts.chat_prompt([ChatMessage(ChatRole.USER, message)])
            request = Request("say", prompt, sampling)
            writer = TextGenerator(service.client, service.prompts)
            async with aclosing(writer.write(request)) as pieces:
                async for piece in pieces:
                    yield piece.text
                    if piece.finish_reason is FinishReason.LENGTH:
                        raise ResponseTooLongError

    async def close(self) -> None:
        await self._service.client.close()


def load_model(model: ModelChoice) -> Service:
    """Create the service of a model. Raises UsageError for a wrong checkpoint."""
    try:
        return load_service(_values(model))
    except (CheckpointError, ConfigError, DecoderConfigError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error


def _values(model: ModelChoice) -> dict[str, Any]:
    """Return the given options as configuration values."""
    anyway = {"watermark": model.watermark, "lexicon": list(model.lexicon)}
    always = {name: value for name, value in anyway.items() if value}
    if not model.name:
        return always
    section = {"model_path": model.name, "huggingface_revision": model.revision or "main"}
    others = {
        "family": model.family,
        "audio_decoder": model.audio_decoder,
        "offline": model.offline,
        "allow_pickle": model.allow_pickle,
    }
    given = {name: value for name, value in others.items() if value}
    return {"model": section, **given, **always}


@contextmanager
def _errors() -> Iterator[None]:
    """Convert errors of the service to SayError."""
    try:
        yield
    except (TTSError, LLMError, DecoderError) as error:
        raise SayError(rule_of(type(error)).code, str(error)) from error
