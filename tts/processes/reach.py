"""Connectivity check: the supervisor periodically connects as a client does."""

from __future__ import annotations

import asyncio
import ssl

from tts.config.server import ServerConfig
from tts.ipc.heartbeat import Heartbeat

PERIOD_S = 2.0
ANSWER_S = 5.0
SETTINGS_TYPE = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, SETTINGS_TYPE, 0, 0, 0, 0, 0))
FRAME_HEAD_BYTES, TYPE_AT = 9, 3


async def unreachable(config: ServerConfig, port: int, limit_s: float) -> None:
    """Wait until connections have failed for `limit_s`, counted from the first success."""
    heartbeat = Heartbeat(limit_s)
    probing = asyncio.create_task(_probe(config, port, heartbeat))
    try:
        await heartbeat.stopped()
    finally:
        probing.cancel()


async def is_reachable(config: ServerConfig, port: int) -> bool:
    """Return whether the server answers a new connection with HTTP/2's first frame.

    A server that requires client certificates sends none without one: there a TLS handshake
    is enough.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            return await _greeted(config, port)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False


async def _probe(config: ServerConfig, port: int, heartbeat: Heartbeat) -> None:
    while True:
        if await is_reachable(config, port):
            heartbeat.beat()
        await asyncio.sleep(PERIOD_S)


async def _greeted(config: ServerConfig, port: int) -> bool:
    tls = _unverified_context() if config.tls_cert is not None else None
    reader, writer = await asyncio.open_connection(config.host, port, ssl=tls)
    try:
        if config.tls_client_ca is not None:
            return True
        writer.write(PREFACE)
        return (await reader.readexactly(FRAME_HEAD_BYTES))[TYPE_AT] == SETTINGS_TYPE
    finally:
        writer.transport.abort()  # closing TLS gracefully may wait for long


def _unverified_context() -> ssl.SSLContext:
    """Return a TLS context that accepts any certificate: the probed server is our own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context
