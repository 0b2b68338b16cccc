"""A child process that ends as soon as it has been ready, and hangs when it is started again."""

from __future__ import annotations

import asyncio

from tts.processes.child import Launch, Ready, Reporter

STATUS = 3


async def run(launch: Launch, report: Reporter) -> int:
    """Report readiness and end, or never become ready."""
    if launch.is_restart:
        await asyncio.Event().wait()
    report(Ready())
    return STATUS
