"""The ASGI application: routes of all modules, CORS, and errors of routing in OpenAI's shape."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from tts.http import info, page, speech, speech_session, text, voices
from tts.http.endpoint import Shared
from tts.http.errors import http_error
from tts.http.exchange import IGNORED_HEADER
from tts.server.call import REQUEST_ID_KEY

MODULES = (info, speech, speech_session, text, voices, page)


def create_app(shared: Shared) -> Starlette:
    """Return the application of one server."""
    origins = shared.host.config.http_cors_origins
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID_KEY, IGNORED_HEADER, "retry-after", "retry-after-ms"],
    )
    app = Starlette(
        routes=[route for module in MODULES for route in module.routes(shared)],
        middleware=[cors] if origins else [],
        exception_handlers={HTTPException: _refuse, Exception: _break},
    )
    app.router.redirect_slashes = False
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    """Return the response for a path or a method that there is not."""
    assert isinstance(error, HTTPException)
    path = f"{request.method} {request.url.path}"
    found = http_error(
        error.status_code, f"there is no {path[:200]}", code="not_found", headers=error.headers
    )
    return Response(found.body, found.status, found.headers)


async def _break(request: Request, error: Exception) -> Response:
    """Return the response for a defect outside of any call; uvicorn logs it."""
    found = http_error(500, "the request failed inside the server", kind="server_error")
    return Response(found.body, found.status, found.headers)
