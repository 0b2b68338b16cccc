"""Whether clients can connect: the supervisor does what they do first, now and then."""

from __future__ import annotations

import asyncio
import ssl

from tts.ipc.pulse import Pulse
from tts.server_config import ServerConfig

PERIOD_S = 2.0
ANSWER_S = 5.0
SETTINGS_TYPE = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, SETTINGS_TYPE, 0, 0, 0, 0, 0))
FRAME_HEAD_BYTES, TYPE_AT = 9, 3


async def unreachable(config: ServerConfig, port: int, limit_s: float) -> None:
    """Until no connection could be made for so long, counted from the first that could."""
    pulse = Pulse(limit_s)
    feeling = asyncio.create_task(_feel(config, port, pulse))
    try:
        await pulse.stopped()
    finally:
        feeling.cancel()


async def is_reachable(config: ServerConfig, port: int) -> bool:
    """Whether the server answers a new connection with HTTP/2's first frame.

    A server that wants client certificates says nothing to one without: there TLS is enough.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            return await _greeted(config, port)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False


async def _feel(config: ServerConfig, port: int, pulse: Pulse) -> None:
    while True:
        if await is_reachable(config, port):
            pulse.felt()
        await asyncio.sleep(PERIOD_S)


async def _greeted(config: ServerConfig, port: int) -> bool:
    tls = _any_certificate() if config.tls_cert is not None else None
    reader, writer = await asyncio.open_connection(config.host, port, ssl=tls)
    try:
        if config.tls_client_ca is not None:
            return True
        writer.write(PREFACE)
        return (await reader.readexactly(FRAME_HEAD_BYTES))[TYPE_AT] == SETTINGS_TYPE
    finally:
        writer.transport.abort()  # a polite end of TLS is waited for, sometimes for long


def _any_certificate() -> ssl.SSLContext:
    """Whose server it is, is known: its certificate may name any host and be expired."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context
