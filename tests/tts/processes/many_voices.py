"""A child process that serves very many voices, as a front end with a large voice folder does."""

from __future__ import annotations

import asyncio

from tts.processes.child import Launch, Ready, Reporter

NAMES = tuple(f"voice-{number}" for number in range(20_000))


async def run(launch: Launch, report: Reporter) -> int:
    """Report readiness and wait for the end."""
    report(Ready("127.0.0.1:1", "m", NAMES))
    await asyncio.Event().wait()
    return 0
