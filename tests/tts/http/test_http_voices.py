"""Voices over HTTP: listed, created from JSON and from forms, used, deleted."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest

from tests.tts.http.http_serving import HttpServing, error_of, run_with_http
from tests.tts.serving import hum, wav
from tts.factory import Service

VOICES = "/v1/audio/voices"
FIELDS = {"name": "mine", "ref_text": "This is what I said.", "consent": "mine", "language": "en"}


def as_json(**values: Any) -> dict[str, Any]:
    clip = base64.b64encode(wav(hum(1.2))).decode()
    return {"json": {**FIELDS, "audio_sample": clip, **values}}


def as_form(**values: Any) -> dict[str, Any]:
    clip = values.pop("audio_sample", wav(hum(1.2)))
    files = {"audio_sample": ("me.wav", clip, "audio/wav")}
    return {"data": {**FIELDS, **values}, "files": files}


async def listed(served: HttpServing) -> list[dict[str, Any]]:
    voices: list[dict[str, Any]] = (await served.client.get(VOICES)).json()["voices"]
    return voices


@pytest.mark.parametrize("write", [as_json, as_form])
def test_voices_are_created_used_and_deleted(service: Service, write: Any) -> None:
    async def ask(served: HttpServing) -> None:
        before = await listed(served)
        assert [voice["id"] for voice in before] == ["hazel", "owen", "edith"]
        assert all(voice["builtin"] and voice["name"] == voice["id"] for voice in before)
        created = await served.client.post(VOICES, **write())
        assert created.status_code == 200, created.text
        assert created.json() in await listed(served)
        assert (created.json()["id"], created.json()["languages"]) == ("mine", ["en"])
        spoken = await served.speak(voice="mine")
        clip = base64.b64encode(wav(hum(1.2))).decode()
        same = await served.speak(ref_audio=clip, ref_text=FIELDS["ref_text"])
        assert spoken.content == same.content
        again = await served.client.post(VOICES, **write())
        assert again.status_code == 409
        assert error_of(again)["code"] == "voice_exists"
        deleted = await served.client.delete(VOICES + "/mine")
        assert deleted.json() == {"id": "mine", "object": "audio.voice", "deleted": True}
        gone = await served.client.delete(VOICES + "/mine")
        assert (gone.status_code, error_of(gone)["param"]) == (404, "voice")
        assert await listed(served) == before

    run_with_http(service, ask)


@pytest.mark.parametrize(
    ("request_of", "param"),
    [
        (lambda: as_json(name="../x"), "name"),
        (lambda: as_json(name=None), "name"),
        (lambda: as_json(audio_sample="?"), "audio_sample"),
        (lambda: as_json(audio_sample=""), "audio_sample"),
        (lambda: as_json(ref_text=""), "ref_text"),
        (lambda: as_json(language="?"), "language"),
        (lambda: as_json(consent="x" * 2000), "consent"),
        (lambda: as_form(name="A B"), "name"),
        (lambda: as_form(audio_sample=b"no audio"), "audio_sample"),
        (lambda: {"data": FIELDS, "files": {"other": b"x"}}, "audio_sample"),
    ],
)
def test_wrong_voices_are_refused(service: Service, request_of: Any, param: str) -> None:
    async def ask(served: HttpServing) -> None:
        response = await served.client.post(VOICES, **request_of())
        assert response.status_code == 400
        assert error_of(response)["param"] == param
        assert len(await listed(served)) == 3

    run_with_http(service, ask)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b"x"),
        ("multipart/form-data; boundary=b", b"--b\r\nno header\r\n\r\n"),
        ("multipart/form-data; boundary=b", b"--b\r\ncontent-type: x\r\n\r\nx\r\n--b--"),
        ("multipart/form-data; boundary=b; charset=none", b"--b--\r\n"),
    ],
)
def test_broken_forms_are_refused(service: Service, kind: str, body: bytes) -> None:
    async def ask(served: HttpServing) -> None:
        headers = {"content-type": kind}
        response = await served.client.post(VOICES, content=body, headers=headers)
        assert response.status_code == 400
        assert error_of(response)["code"] == "invalid_request"

    run_with_http(service, ask)


def test_a_built_in_voice_is_not_deleted(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        for name, status in (("hazel", 400), ("UPPER", 400), ("none", 404)):
            assert (await served.client.delete(f"{VOICES}/{name}")).status_code == status

    run_with_http(service, ask)


def test_changing_voices_needs_the_admin_token(service: Service) -> None:
    async def ask(served: HttpServing) -> None:
        user, admin = ({"authorization": f"Bearer {name}"} for name in ("user", "admin"))

        async def statuses(headers: dict[str, str]) -> list[int]:
            answers: list[httpx.Response] = [
                await served.client.get(VOICES, headers=headers),
                await served.client.post(VOICES, **as_json(), headers=headers),
                await served.client.delete(VOICES + "/mine", headers=headers),
            ]
            return [answer.status_code for answer in answers]

        assert await statuses({}) == [401, 401, 401]
        assert await statuses(user) == [200, 403, 403]
        assert await statuses(admin) == [200, 200, 200]

    run_with_http(service, ask, auth_token="user", admin_token="admin")


def test_a_blend_needs_no_recording(service: Service) -> None:
    """This model has none, which the last check says."""

    async def ask(served: HttpServing) -> None:
        clip = base64.b64encode(wav(hum(1.2))).decode()
        for body, param, part in (
            ({"blend": "hazel+"}, "blend", "character 7"),
            ({"blend": "hazel+owen", "audio_sample": clip}, "blend", "send one of them"),
            ({}, "audio_sample", "or a blend"),
            ({"blend": "hazel+owen"}, None, "cannot be blended"),
        ):
            response = await served.client.post(VOICES, json={"name": "new", **body})
            assert response.status_code == 400
            error = error_of(response)
            assert (error["param"], part in error["message"]) == (param, True), error
        form = {"data": {"name": "new", "blend": "hazel+"}, "files": {"other": b"x"}}
        assert error_of(await served.client.post(VOICES, **form))["param"] == "blend"

    run_with_http(service, ask)
