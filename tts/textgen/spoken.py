"""Text that is spoken while it is generated: one stream of its pieces and of the speech's events.

pieces ─▶ fed to the session ─▶ events
   └──────────────┬────────────────┘
                  ▼ each when it is there

Both models share the processors of a machine without a GPU. So the text waits from its first
clause to the first audio, which nothing else shortens as much, and nothing is lost: a text is
generated faster than it is spoken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from tts.engine.client import Hold
from tts.speech.types import AudioChunk, FlushDone, SessionEvent, SpeechEvent, UtteranceCancelled
from tts.text.clean import without_controls
from tts.textgen.generator import TextPiece

Source = AsyncGenerator[Any, None]
HOLD_S = 0.25  # longest wait of a text for the first audio


class SpokenSession(Protocol):
    """Session that speaks one text: `StreamingSession`, or that of another server."""

    @property
    def awaits_first_audio(self) -> bool:
        """Whether the first audio is being prepared on this machine."""

    def feed(self, text: str) -> None:
        """Append text, which may be cut anywhere within words."""

    def close(self) -> None:
        """End the text: the rest is spoken, then `Done` follows."""

    def events(self) -> AsyncGenerator[SessionEvent, None]:
        """Yield all events. Closing the iterator cancels the session."""


async def speak_text(
    pieces: AsyncGenerator[TextPiece, None], session: SpokenSession, hold: Hold
) -> AsyncGenerator[TextPiece | SpeechEvent, None]:
    """Yield the pieces of a text as they are generated, and the events of a session that speaks it.

    `hold` is that of the text. Both have their own order. Closing the iterator cancels both.
    Raises what either of them raises; the other one is cancelled.
    """
    release: asyncio.TimerHandle | None = None
    async with aclosing(pieces), aclosing(session.events()) as events:
        steps: dict[asyncio.Future[Any], Source] = {_step(pieces): pieces, _step(events): events}
        try:
            while steps:
                done, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
                for step in done:
                    item, source = step.result(), steps.pop(step)
                    if source is pieces:
                        _feed(session, item)
                        if release is None and session.awaits_first_audio:
                            hold.set(is_set=True)
                            release = _later(HOLD_S, hold)
                    elif isinstance(item, AudioChunk):
                        hold.set(is_set=False)
                    if item is None:
                        continue
                    assert not isinstance(item, FlushDone | UtteranceCancelled)
                    steps[_step(source)] = source
                    yield item
        finally:
            if release is not None:
                release.cancel()
            for step in steps:
                step.cancel()
            await asyncio.gather(*steps, return_exceptions=True)


def _later(delay_s: float, hold: Hold) -> asyncio.TimerHandle:
    """Release a hold after a time."""
    return asyncio.get_running_loop().call_later(delay_s, lambda: hold.set(is_set=False))


def _step(source: Source) -> asyncio.Future[Any]:
    """Request the next item of a source; None at its end."""
    return asyncio.ensure_future(anext(source, None))


def _feed(session: SpokenSession, piece: TextPiece | None) -> None:
    """Feed a piece to a session; close its input after the last one.

    A model may generate control characters, which sessions refuse.
    """
    if piece is None:
        session.close()
    elif piece.text:
        session.feed(without_controls(piece.text))
