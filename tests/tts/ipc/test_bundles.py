"""Messages that are sent together, both ways."""

from __future__ import annotations

import asyncio

import pytest

from decoder import StreamingOptions
from tests.tts.engine.jobs import listen, run, speech
from tests.tts.ipc.remote_engine import new_base, remote_engine, wait_until
from tests.tts.ramp import RampClient
from tts.ipc import engine_server
from tts.ipc.codec import decode_from_engine
from tts.ipc.messages import Credit, FrontEndMessage


def test_chunks_of_many_streams_are_sent_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credits are sent together as well; large messages are sent separately."""
    monkeypatch.setattr(engine_server, "BUNDLE_BYTES", 30_000)
    job = speech("x", max_tokens=64, streaming=StreamingOptions((2, 8)))
    engine = RampClient()
    engine.is_endless = True

    async def scenario() -> None:
        async with remote_engine(engine, new_base()) as served:
            link, server = served.client._link, served.server
            sizes: list[tuple[int, int]] = []
            received, handled = link._received, list[Credit]()

            def watched(frames: list[bytes]) -> None:
                sizes.append((len(decode_from_engine(frames[-1])), len(frames[-1])))
                received(frames)

            def handle(message: FrontEndMessage, peer: object) -> None:
                handled.extend([message] if isinstance(message, Credit) else [])
                act(message, peer)

            act = server._handle
            monkeypatch.setattr(link._replies, "_take", watched)
            monkeypatch.setattr(server, "_handle", handle)
            engine.gate.clear()  # until all streams have begun, so that their blocks come together
            streams = [asyncio.create_task(listen(served.client, job)) for _ in range(8)]
            await wait_until(lambda: engine.num_open == 8)
            engine.gate.set()
            heard = await asyncio.gather(*streams)
            assert {sum(block.num_codes for block in blocks) for blocks in heard} == {64}
            assert max(count for count, _ in sizes) > 4
            assert all(count == 1 or size < 30_100 for count, size in sizes)
            assert max(len(took.num_items) for took in handled) > 4

    run(scenario)
