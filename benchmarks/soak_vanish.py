"""A client that will be killed: `python -m benchmarks.soak_vanish ADDRESS ID ID ID`.

It makes three calls with these ids (speech, speech from streamed text, text), prints each id at its
first message, and each id and status of a call that ended before.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from itertools import repeat
from typing import Any

import grpc

from benchmarks.soak_ledger import code_of
from tts.v1 import speech_pb2, speech_pb2_grpc, text_pb2, text_pb2_grpc

NUM_CALLS = 3
SENTENCE = "The lamp by the window flickered twice, and then the room was dark. "
WORDS_S = 0.5  # between two pieces of text


async def typed(request_id: str) -> AsyncIterator[speech_pb2.StreamingSynthesizeRequest]:
    """Send sentences without end."""
    synthesis = speech_pb2.SynthesisConfig(request_id=request_id)
    config = speech_pb2.StreamingSynthesizeConfig(synthesis=synthesis)
    yield speech_pb2.StreamingSynthesizeRequest(config=config)
    for text in repeat(SENTENCE):
        yield speech_pb2.StreamingSynthesizeRequest(text=text)
        await asyncio.sleep(WORDS_S)


async def read(request_id: str, call: Any) -> None:
    """Print its first message, and its end."""
    is_first = True
    try:
        async for _ in call:
            if is_first:
                print(request_id, flush=True)
            is_first = False
        code = (await call.code()).name
    except grpc.aio.AioRpcError as error:
        code = code_of(error)
    print(request_id, code, flush=True)


async def run(address: str, request_ids: Sequence[str]) -> None:
    """Make all calls at once, on one connection."""
    spoken, fed, written = request_ids
    speech = speech_pb2.SynthesizeStreamRequest(
        config=speech_pb2.SynthesisConfig(request_id=spoken),
        input=speech_pb2.SynthesisInput(text=SENTENCE * 20),
    )
    text = text_pb2.GenerateStreamRequest(
        config=text_pb2.GenerationConfig(request_id=written),
        input=text_pb2.GenerationInput(prompt=SENTENCE),
    )
    text.config.sampling.ignore_eos = True
    async with grpc.aio.insecure_channel(address) as channel:
        speaker = speech_pb2_grpc.SpeechServiceStub(channel)
        writer = text_pb2_grpc.TextServiceStub(channel)
        await asyncio.gather(
            read(spoken, speaker.SynthesizeStream(speech)),
            read(fed, speaker.StreamingSynthesize(typed(fed))),
            read(written, writer.GenerateStream(text)),
        )


def main(argv: Sequence[str] | None = None) -> None:
    address, *request_ids = sys.argv[1:] if argv is None else argv
    asyncio.run(run(address, request_ids))


if __name__ == "__main__":
    main()
