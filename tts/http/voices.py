"""Routes of voices: list, create from a recording or from other voices, delete."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
from pydantic import Field
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import parse_options_header
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.routing import BaseRoute

from tts.errors import InvalidRequestError
from tts.http.endpoint import Shared
from tts.http.exchange import Exchange, Items, JsonBody, validated
from tts.http.speech_body import PronunciationItem, decoded
from tts.server.voice_admin import create_voice
from tts.server.wire.speech import check_voice_name
from tts.v1 import speech_pb2 as pb
from tts.voices.types import Voice

MULTIPART = "multipart/form-data"
MAX_FIELDS = 16
CLIP = "audio_sample"

NAMES: Mapping[str, str] = {
    "voice_id": "name",
    "prompt": CLIP,
    "prompt.transcript": "ref_text",
    "language_code": "language",
    "pronunciations": "pronunciations",
}
"""Fields of CreateVoiceRequest by their names in JSON and in forms, for errors."""


class VoiceBody(JsonBody):
    """JSON of a new voice; a form has the same fields, with a file as `audio_sample`, and
    `pronunciations` as the text of their JSON.

    It is made of a recording, or is a blend of other voices.
    """

    name: str
    audio_sample: str | None = None
    blend: str = ""
    ref_text: str = ""
    consent: str = ""
    language: str = ""
    display_name: str = ""
    pronunciations: Items[PronunciationItem] = Field(default_factory=list)


def routes(shared: Shared) -> list[BaseRoute]:
    """Return the routes of this module."""
    path = "/v1/audio/voices"
    return [
        shared.route("GET", path, _list),
        shared.route("POST", path, _create, has_body=True, is_admin=True, names=NAMES),
        shared.route("DELETE", path + "/{name}", _delete, is_admin=True),
    ]


async def _list(exchange: Exchange) -> None:
    names = exchange.host.speaker.names
    await exchange.reply({"voices": [_shown(v, names.model) for v in names.voices.voices()]})


async def _create(exchange: Exchange) -> None:
    if exchange.request.headers.get("content-type", "").lower().startswith(MULTIPART):
        body, audio = await _read_form(exchange)
    else:
        body = await exchange.json(VoiceBody)
        audio = None if body.audio_sample is None else decoded(body.audio_sample, CLIP)
    request = pb.CreateVoiceRequest(
        voice_id=body.name,
        prompt=_prompt(body, audio),
        display_name=body.display_name,
        language_code=body.language,
        consent=body.consent,
        pronunciations=[item.to_proto() for item in body.pronunciations],
        blend=body.blend,
    )
    created = await create_voice(exchange.host, exchange.call, request)
    await exchange.reply(_shown(created, exchange.host.speech.synthesizer.settings.model))


def _prompt(body: VoiceBody, audio: bytes | None) -> pb.VoicePrompt | None:
    """Return the recording with its transcript; None for a blend without one."""
    if audio is not None:
        return pb.VoicePrompt(audio=audio, transcript=body.ref_text)
    if not body.blend:
        raise InvalidRequestError.of(CLIP, "is missing: send a WAV, FLAC or Ogg, or a blend")
    return None


async def _read_form(exchange: Exchange) -> tuple[VoiceBody, bytes | None]:
    """Return the fields of a form and the bytes of its recording, if it has one."""

    async def parts() -> AsyncGenerator[bytes, None]:
        yield exchange.take_body()

    headers = exchange.request.headers
    _check_charset(headers["content-type"])
    parser = _InMemory(headers, parts(), max_files=1, max_fields=MAX_FIELDS)
    try:
        form = await parser.parse()
    except (MultiPartException, MultipartParseError) as error:
        raise InvalidRequestError.of("", f"the form is broken: {error}") from None
    try:
        clip = form.get(CLIP)
        if isinstance(clip, str):
            raise InvalidRequestError.of(CLIP, "must be a file: a WAV, FLAC or Ogg")
        fields: dict[str, Any] = {k: v for k, v in form.items() if isinstance(v, str)}
        if "pronunciations" in fields:
            fields["pronunciations"] = _from_json(fields["pronunciations"])
        audio = None if clip is None else await clip.read()
        return validated(VoiceBody, fields), audio
    finally:
        await form.close()


def _from_json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError.of("pronunciations", f"must be a list in JSON: {error}") from None


def _check_charset(content_type: str) -> None:
    """Raise InvalidRequestError for a form that is not in UTF-8.

    Python's other codecs may take minutes for a megabyte (punycode), or raise errors of any kind.
    """
    _, options = parse_options_header(content_type)
    charset = options.get(b"charset", b"utf-8")
    if charset.lower() != b"utf-8":
        raise InvalidRequestError.of("", "the form must be in UTF-8; leave charset out")


class _InMemory(MultiPartParser):
    """Parser of a form that writes no files: the body is bounded and in memory already."""

    spool_max_size = 2**62


async def _delete(exchange: Exchange) -> None:
    name = exchange.request.path_params["name"]
    check_voice_name(name, "name")
    exchange.host.speech.synthesizer.voices.delete(name)
    await exchange.reply({"id": name, "object": "audio.voice", "deleted": True})


def _shown(voice: Voice, model: str) -> dict[str, Any]:
    return {
        "id": voice.name,
        "object": "audio.voice",
        "name": voice.name,
        "display_name": voice.display_name,
        "languages": list(voice.language_codes),
        "model": model,
        "builtin": voice.is_builtin,
    }
