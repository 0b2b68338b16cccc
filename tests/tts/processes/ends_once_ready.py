"""A child process that ends as soon as it has been ready."""

from __future__ import annotations

from tts.processes.child import Launch, Ready, Reporter

STATUS = 3


async def run(_: Launch, report: Reporter) -> int:
    """Report readiness and end."""
    report(Ready())
    return STATUS
