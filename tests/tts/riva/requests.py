"""Requests and calls of Riva's protocol, with the generated stubs."""

from __future__ import annotations

from typing import Any

from tests.tts.serving import TEXT, Serving
from tts.riva.stubs import tts_pb2 as pb
from tts.riva.stubs.tts_pb2_grpc import RivaSpeechSynthesisStub

SERVICE = "nvidia.riva.tts.RivaSpeechSynthesis"


def request(
    text: str = TEXT, seed: int = 7, max_tokens: int | None = 40, **values: Any
) -> pb.SynthesizeSpeechRequest:
    """Return a request with the seed and length of `tests.tts.serving.config`, and with the
    language that Riva's clients send.
    """
    options = {"seed": str(seed), **values.pop("custom_configuration", {})}
    if max_tokens is not None:
        options["max_tokens"] = str(max_tokens)
    values = {"language_code": "en-US", **values}
    return pb.SynthesizeSpeechRequest(text=text, custom_configuration=options, **values)


def riva(served: Serving) -> RivaSpeechSynthesisStub:
    return RivaSpeechSynthesisStub(served.channel)


async def whole(served: Serving, *values: Any, **fields: Any) -> pb.SynthesizeSpeechResponse:
    """Return the response of Synthesize."""
    response: pb.SynthesizeSpeechResponse = await riva(served).Synthesize(
        request(*values, **fields)
    )
    return response


async def online(
    served: Serving, *requests: pb.SynthesizeSpeechRequest
) -> list[pb.SynthesizeSpeechResponse]:
    """Send all requests, close, and return the responses of SynthesizeOnline."""
    return [response async for response in riva(served).SynthesizeOnline(iter(requests))]


def audio_of(responses: list[pb.SynthesizeSpeechResponse]) -> bytes:
    assert all(response.audio for response in responses)
    return b"".join(response.audio for response in responses)
