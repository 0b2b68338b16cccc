"""A child process that ends as soon as it has been ready."""

from __future__ import annotations

import sys

from tts.processes.child import Launch, Ready, Reporter, run_child

STATUS = 3


async def run(_: Launch, report: Reporter) -> int:
    """Report readiness and end."""
    report(Ready())
    return STATUS


if __name__ == "__main__":
    sys.exit(run_child(run))
