"""Creation of voices by clients, the same for every protocol."""

from __future__ import annotations

from dataclasses import replace

from tts.server.call import Call
from tts.server.context import ServerContext
from tts.server.wire.common import Violations
from tts.server.wire.speech import read_clip
from tts.v1 import speech_pb2 as pb
from tts.voices.types import Voice

MAX_DISPLAY_NAME = 200
MAX_CONSENT = 1000


async def create_voice(host: ServerContext, call: Call, request: pb.CreateVoiceRequest) -> Voice:
    """Check and encode a recording, or blend other voices, and register the result as a voice.

    Raises InvalidRequestError, VoiceExistsError or PreconditionError for the request, and the
    errors of `VoiceRegistry.create`.
    """
    synthesizer = host.speech.synthesizer
    _check_new_voice(request)
    synthesizer.voices.check_new(request.voice_id)
    languages = (request.language_code,) if request.language_code else ()
    voice = Voice(
        name=request.voice_id,
        display_name=request.display_name or request.voice_id,
        language_codes=languages,
        consent=request.consent,
    )
    if request.blend:
        blend = synthesizer.voices.blend(request.blend, "blend")
        languages = languages or blend.language_codes
        voice = replace(voice, language_codes=languages, prompt=blend.prompt)
    else:
        voice = replace(voice, clip=read_clip(request.prompt, "prompt"))
        async with host.enter(call):
            voice = await synthesizer.cloner.ready(voice)
    return synthesizer.voices.create(voice)


def _check_new_voice(request: pb.CreateVoiceRequest) -> None:
    with Violations() as wrong:
        is_one = not (request.blend and request.HasField("prompt"))
        wrong.require(is_one, "blend", "cannot be set with a prompt: send one of them")
        if request.language_code:
            wrong.language(request.language_code, "language_code")
        for field, most in (("display_name", MAX_DISPLAY_NAME), ("consent", MAX_CONSENT)):
            value = getattr(request, field)
            ok = len(value) <= most and value.isprintable()
            wrong.require(ok, field, f"must be at most {most} printable characters")
