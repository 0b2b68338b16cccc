"""A connection to the engine: it is up when everything can be sent."""

from __future__ import annotations

import asyncio

import zmq

from tests.tts.engine.jobs import run
from tests.tts.ipc.remote_engine import new_base
from tts.ipc.endpoints import Endpoints
from tts.ipc.link import HELLO_S, Link


def test_no_hello_is_sent_before_requests_can_be() -> None:
    """Each socket connects by itself, and the answer to a Hello says that requests are welcome."""
    endpoints = Endpoints.of(new_base(), "server")

    async def scenario() -> None:
        with zmq.Context() as context:
            sockets = [context.socket(zmq.PULL) for _ in range(3)]
            control, cancel, requests = sockets
            control.bind(endpoints.control)
            cancel.bind(endpoints.cancel)
            link = Link(endpoints, "test", context)
            welcome = asyncio.create_task(link.welcome())
            await asyncio.sleep(5 * HELLO_S)
            assert not control.poll(0)
            requests.bind(endpoints.request)
            assert await asyncio.to_thread(control.poll, 60_000)
            welcome.cancel()
            link.close()
            for socket in sockets:
                socket.close(linger=0)

    run(scenario)
