"""The web page's files: types, policy, caching, access; the pages that may call a server."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import tiny_config
from tests.tts.http.http_serving import (
    SPEECH,
    HttpServing,
    error_of,
    http_serving,
    run_with_http,
    speech,
)
from tests.tts.serving import run, serving
from tts.config.server import ServerConfig
from tts.factory import Service, create_service, with_text_model
from tts.http.endpoint import is_allowed_origin
from tts.http.page import FILES, STATIC

TLS = Path(__file__).parents[1] / "tls"


def test_files(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        for path, (name, media_type) in FILES.items():
            shown = await served.client.get(path)
            assert shown.status_code == 200
            assert shown.content == (STATIC / name).read_bytes()
            assert shown.headers["content-type"].partition(";")[0] == media_type
            head = await served.client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(shown.content))
        for path in ("/index.html", "/static/app.js", "/..%2fpage.py", "/favicon.ico"):
            assert error_of(await served.client.get(path))["code"] == "not_found"
        assert (await served.client.post("/")).status_code == 405

    run_with_http(service, ask, auth_token="secret")


def test_every_file_is_served() -> None:
    assert {name for name, _ in FILES.values()} == {path.name for path in STATIC.iterdir()}


def test_the_policy_allows_this_server_only(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        for path in FILES:
            headers = (await served.client.get(path)).headers
            policy = dict(
                part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
            )
            assert policy.pop("default-src") == "'none'"
            assert policy.pop("media-src") == "blob:"
            assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {
                "'none'"
            }
            assert set(policy.values()) == {"'none'", "'self'"}
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"

    run_with_http(service, ask)


def test_nothing_of_another_server_is_named() -> None:
    for path in STATIC.iterdir():
        named = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", path.read_text(encoding="utf-8")))
        assert named <= {"http://www.w3.org"}, path  # the name space of SVG


def test_a_file_is_sent_once(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        for path in FILES:
            headers = (await served.client.get(path)).headers
            assert headers["cache-control"] == "no-cache"
            for tags in (headers["etag"], f'"other", W/{headers["etag"]}'):
                again = await served.client.get(path, headers={"if-none-match": tags})
                assert (again.status_code, again.content) == (304, b"")
                assert again.headers["etag"] == headers["etag"]
            changed = await served.client.get(path, headers={"if-none-match": '"other"'})
            assert changed.status_code == 200

    run_with_http(service, ask)


def test_models_say_what_they_can_do(service: Service, text_checkpoint: Path) -> None:
    async def ask(served: HttpServing) -> list[str]:
        (model,) = (await served.client.get("/v1/models")).json()["data"]
        names: list[str] = model["capabilities"]
        return names

    assert run_with_http(service, ask) == ["speech", "voice_cloning"]

    async def scenario() -> list[str]:
        writing = create_service(tiny_config(text_checkpoint))
        async with http_serving(writing) as served:
            found = await ask(served)
        await writing.client.close()
        return found

    assert run(scenario()) == ["chat"]


def test_a_chat_says_whether_it_can_be_spoken(service: Service, text_checkpoint: Path) -> None:
    """By this server's voice or by a speech server, whose voices are listed then."""
    settings = tiny_config(text_checkpoint, sampling={"enable_structured_output": True})

    async def ask(served: HttpServing) -> tuple[list[str], list[Any]]:
        models = (await served.client.get("/v1/models")).json()["data"]
        names: list[str] = models[-1]["capabilities"]
        return names, (await served.client.get("/v1/audio/voices")).json()["voices"]

    async def scenario() -> None:
        writing = create_service(settings)
        async with http_serving(with_text_model(service, writing)) as served:
            names, voices = await ask(served)
            assert names == ["chat", "spoken_chat"]
        async with AsyncExitStack() as speaking:
            speaker = await speaking.enter_async_context(serving(service))
            address = speaker.server.address
            async with http_serving(writing, speech_server=address) as served:
                assert await ask(served) == (["chat", "spoken_chat"], voices)
                await speaking.aclose()
                while "spoken_chat" in (await served.client.get("/v1/models")).text:
                    await asyncio.sleep(0.02)
                lost = await served.client.get("/v1/audio/voices")
                assert lost.status_code == 503
        await writing.client.close()

    run(scenario())


def test_the_own_page_may_speak_and_others_may_not(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        port = served.http.port
        pages = {
            f"http://127.0.0.1:{port}": 200,
            f"http://127.0.0.1:{port + 1}": 403,
            f"http://127.0.0.1:{port}.evil.example": 403,
            "http://[": 403,
            "null": 403,
        }
        for origin, status in pages.items():
            headers = {"origin": origin}
            response = await served.client.post(SPEECH, json=speech(), headers=headers)
            assert response.status_code == status, origin
        # The name of another page whose address has changed to that of this server.
        headers = {"origin": f"http://evil.example:{port}", "host": f"evil.example:{port}"}
        refused = await served.client.post(SPEECH, json=speech(), headers=headers)
        assert refused.status_code == 403
        assert "http_cors_origins" in error_of(refused)["message"]

    run_with_http(service, ask)


@pytest.mark.parametrize(
    ("values", "host", "is_allowed"),
    [
        ({}, "localhost:8880", True),
        ({}, "sonant.localhost:8880", True),
        ({}, "[::1]:8880", True),
        ({}, "speech.example", False),
        ({"http_cors_origins": ["http://speech.example"]}, "speech.example", True),
        ({"host": "::1"}, "speech.example", False),
        ({"host": "0.0.0.0"}, "speech.example", True),
        (
            {"tls_cert": TLS / "server.pem", "tls_key": TLS / "server.key"},
            "speech.example",
            True,
        ),
    ],
)
def test_names_of_a_server(values: dict[str, object], host: str, is_allowed: bool) -> None:
    headers = {"origin": f"http://{host}", "host": host}
    assert is_allowed_origin(headers, ServerConfig.model_validate(values)) == is_allowed
