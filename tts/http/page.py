"""The web page at `/`: static files of the package, which need no token: the page asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tts.http.endpoint import Shared

STATIC = Path(__file__).parent / "static"

FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html"),
    "/style.css": ("style.css", "text/css"),
    "/app.js": ("app.js", "text/javascript"),
    "/audio.js": ("audio.js", "text/javascript"),
    "/api.js": ("api.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""Paths of the page's files, with the name in the package and the media type of each."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: files and calls of this server, recordings of the page, nothing else."""

HEADERS = {
    "cache-control": "no-cache",  # browsers ask each time, and get 304 for a file they have
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def routes(shared: Shared) -> list[BaseRoute]:
    """Return the routes of this module."""
    return [_route(path, *file) for path, file in FILES.items()]


def _route(path: str, name: str, media_type: str) -> Route:
    data = (STATIC / name).read_bytes()
    tag = f'"{sha256(data).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": tag}

    async def show(request: Request) -> Response:
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(data, 200, headers, media_type)

    return Route(path, show)
