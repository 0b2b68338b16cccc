"""Routes about the server: models, health and metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from tts.errors import ModelNotFoundError, NotAvailableError
from tts.factory import Service
from tts.http.endpoint import Shared
from tts.http.errors import retry_headers
from tts.http.exchange import Exchange
from tts.observe.exporter import CONTENT_TYPE, exposition, is_shared
from tts.server.context import ServerContext
from tts.server.remote_speaker import RemoteSpeaker

RETRY_S = 1.0
_SERVING = {True: "SERVING", False: "NOT_SERVING"}


def routes(shared: Shared) -> list[BaseRoute]:
    """Return the routes of this module."""
    started = int(time.time())

    def models(exchange: Exchange) -> dict[str, dict[str, Any]]:
        """Return the served models and their adapters by name."""
        return {
            name: {
                "id": name,
                "object": "model",
                "created": started,
                "owned_by": "sonant",
                "capabilities": _capabilities(service, exchange.host),
                "parent": service.model if name != service.model else None,
            }
            for service in exchange.host.service.services
            for name in (service.model, *service.text.adapters)
        }

    async def list_models(exchange: Exchange) -> None:
        await exchange.reply({"object": "list", "data": list(models(exchange).values())})

    async def show_model(exchange: Exchange) -> None:
        name, known = exchange.request.path_params["model"], models(exchange)
        if name not in known:
            raise ModelNotFoundError(name, known)
        await exchange.reply(known[name])

    async def health(request: Request) -> Response:
        host = shared.host
        speaker = {}
        if host.config.speech_server is not None:
            speaker = {"speech_server": _SERVING[host.is_speaker_serving]}
        if host.is_healthy:
            return JSONResponse({"status": _SERVING[True], **speaker})
        return JSONResponse({"status": _SERVING[False], **speaker}, 503, retry_headers(RETRY_S))

    return [
        shared.route("GET", "/v1/models", list_models),
        shared.route("GET", "/v1/models/{model:path}", show_model),
        shared.route("GET", "/metrics", _show_metrics),
        Route("/health", health),
    ]


def _capabilities(service: Service, host: ServerContext) -> list[str]:
    """Return the names of what a model can do; with a speech server texts are spoken there."""
    speech, text = service.synthesizer, service.text
    is_speaker_serving = isinstance(host.speaker, RemoteSpeaker) and host.speaker.is_serving
    is_mute = host.service.synthesizer is None and not is_speaker_serving
    speaks = speech is not None or is_speaker_serving
    is_chat = speech is None and text.generates and service.prompts.can_chat
    found = {
        "speech": speech is not None,
        "word_timestamps": speaks and host.speaker.names.times_words,
        "voice_cloning": speech is not None and speech.cloner.can_clone,
        "instructions": speech is not None and speech.takes_instructions,
        "chat": is_chat,
        "spoken_chat": is_chat and not is_mute,
        "embeddings": text.embeds,
    }
    return [name for name, is_there in found.items() if is_there]


async def _show_metrics(exchange: Exchange) -> None:
    """Send the metrics; those of all processes if they are added up."""
    if exchange.host.config.front_ends > 1 and not is_shared():
        raise NotAvailableError(
            "with several front ends, metrics need --prometheus-metrics-mode "
            "launch_multiproc_server"
        )
    text = await asyncio.to_thread(exposition, exchange.host.metrics)
    exchange.headers |= {"content-type": CONTENT_TYPE, "content-length": str(len(text))}
    await exchange.finish(text)
