"""All messages of a socket are read, also after one whose handler fails."""

from __future__ import annotations

import asyncio
from typing import Any

import zmq

from tests.tts.engine.jobs import run
from tests.tts.ipc.remote_engine import wait_until
from tts.ipc.sockets import Inlet, bound_socket

ADDRESS = "inproc://inlet"


def test_a_failing_message_does_not_block_later_ones() -> None:
    async def scenario() -> None:
        failures: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
        taken: list[bytes] = []

        def take(frames: list[bytes]) -> None:
            taken.extend(frames)
            if frames == [b"bad"]:
                raise ValueError("bad")

        with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
            socket = bound_socket(context, zmq.PULL, ADDRESS, 100)
            sender.connect(ADDRESS)
            for message in (b"a", b"bad", b"b", b"bad", b"c"):
                sender.send(message)
            inlet = Inlet(socket, take)
            try:
                await wait_until(lambda: len(taken) == 5)
            finally:
                inlet.close()
        assert taken == [b"a", b"bad", b"b", b"bad", b"c"]
        assert [str(failure) for failure in failures] == ["bad", "bad"]

    run(scenario)
