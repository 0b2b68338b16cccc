"""`PrefillClient`: the client of an engine that computes prompts for other engines.

event loop                              engine thread
prefill ── submit ────────────────────▶ steps … last chunk ─▶ claim of the cached pages
  ▲                                                              │
  └── read, part by part, on a worker thread ◀───────────────────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from llm import EngineStoppedError, FinishReason, Request, SamplingParams, TokenChunk
from tts.engine.client import AudioBlock, EncodedClip, Hold, SpeechJob
from tts.engine.local_client import LocalEngineClient
from tts.errors import NotAvailableError, SynthesisError
from tts.observe.engine_status import EngineStatus

if TYPE_CHECKING:
    from llm import PageClaim, PeerSlots

logger = logging.getLogger("tts.engine")

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
"""A prompt without generation: its one token is not used."""


NUM_SLOTS = 5
"""Slots of a reader's memory, used in turn: one more than it lets be unread, as the next part is
written before it may be sent."""
MAX_PEERS = 16  # memory of readers that stays mapped
NO_CONTENT = np.empty(0, np.uint8)

PeerHandle = tuple[bytes, int, int, bytes, int]
"""`llm.PeerSlots.share`."""


class PagePart(NamedTuple):
    """The next pages of a prompt: their content, or the slot of the reader's GPU that has it."""

    num_pages: int
    content: np.ndarray
    slot: int = -1
    is_last: bool = False


class PrefillClient:
    """`EngineClient` that refuses what generates, and has `prefill`. It owns the local client."""

    codec = None

    def __init__(self, local: LocalEngineClient) -> None:
        """`local`: client of an engine with `transfer`."""
        transfer = local.engine.transfer
        assert transfer is not None  # an engine of this role has it
        self._local, self._engine, self._transfer = local, local.engine, transfer
        self._peers: dict[PeerHandle, PeerSlots | None] = {}  # None: it cannot be used

    def __repr__(self) -> str:
        return f"PrefillClient({self._local!r})"

    @property
    def page_format(self) -> str:
        """The format of the pages, as text: engines with the same can use them."""
        return str(self._transfer.format)

    async def prefill(
        self, request: Request, first_page: int, peer: PeerHandle | None = None
    ) -> AsyncGenerator[PagePart, None]:
        """Compute a prompt and stream its pages from `first_page` on; the last part may be empty.

        With `peer` they go to the memory of the reader's GPU, where this one reaches it. The pages
        are held until the iterator is closed, which also cancels the computation. Raises the errors
        of `Engine.submit`, and SynthesisError when a step fails.
        """
        request = replace(request, sampling=ONE_TOKEN)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[TokenChunk] = loop.create_future()
        claims: list[PageClaim] = []  # of the engine's thread; at most one

        def on_tokens(chunk: TokenChunk) -> None:
            try:
                if chunk.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    # There is room: the request has just given back the page of its last token.
                    claim = self._transfer.claim(f"pages of {request.request_id}", request)
                    claims.extend([claim] if claim is not None else [])
            finally:
                if chunk.finish_reason is not None:
                    with suppress(RuntimeError):  # the loop is closed, so no reader is left
                        loop.call_soon_threadsafe(_set, ended, chunk)

        self._engine.submit(request, on_tokens)
        num_read = 0
        try:
            chunk = await ended
            if chunk.finish_reason is FinishReason.ERROR:
                raise SynthesisError(f"the prompt was not computed: {chunk.error}")
            async for part in self._parts(claims, first_page, peer):
                num_read += part.num_pages
                yield part
        finally:
            self._release(request.request_id, claims, num_read)

    async def _parts(
        self, claims: list[PageClaim], first_page: int, peer: PeerHandle | None
    ) -> AsyncGenerator[PagePart, None]:
        pages = claims[0].pages[first_page : claims[0].num_cached] if claims else ()
        if not pages:
            yield PagePart(0, NO_CONTENT, is_last=True)
        slot = 0
        while pages:
            part = pages[: self._transfer.peer_pages]
            if peer is not None and await asyncio.to_thread(self._put, part, peer, slot):
                pages = pages[len(part) :]
                yield PagePart(len(part), NO_CONTENT, slot, not pages)
                slot = (slot + 1) % NUM_SLOTS
                continue
            peer, part = None, pages[: self._transfer.part_pages]
            pages = pages[len(part) :]
            content = await asyncio.to_thread(self._transfer.read, part)
            yield PagePart(len(part), content, is_last=not pages)

    def _put(self, pages: tuple[int, ...], peer: PeerHandle, slot: int) -> bool:
        """Copy pages to a slot of the reader's GPU; return whether this is possible."""
        if not self._transfer.is_on_gpu:
            return False
        try:
            if peer not in self._peers:
                if len(self._peers) >= MAX_PEERS:
                    return False  # none is unmapped: another thread may be writing it
                self._peers[peer] = self._transfer.open_slots(peer, NUM_SLOTS)
            slots = self._peers[peer]
            if slots is None:
                return False
            self._transfer.read_to(pages, slots, slot)
        except (RuntimeError, ValueError) as error:
            logger.warning("pages go over the host's memory: %s", error)
            self._peers[peer] = None
            return False
        return True

    def _release(self, request_id: str, claims: list[PageClaim], num_read: int) -> None:
        """Cancel the computation, if it has not ended, and release the pages."""

        def release() -> None:  # after the cancellation, so that no claim follows
            for claim in claims:
                self._transfer.release(claim, num_read=num_read)

        self._engine.cancel(request_id)
        with suppress(EngineStoppedError):
            self._engine.run_on_engine(release)

    def generate(
        self, request: Request, hold: Hold | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Refuse: raises NotAvailableError."""
        self._refuse()

    def speak(self, job: SpeechJob) -> AsyncGenerator[AudioBlock, None]:
        """Refuse: raises NotAvailableError."""
        self._refuse()

    async def encode_prompt(self, samples: np.ndarray) -> EncodedClip:
        """Refuse: raises NotAvailableError."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotAvailableError("this engine computes prompts for other engines only")

    async def warm_up(self) -> None:
        """Compute a prompt of one token, so that the first one does not pay for allocations."""
        async for _ in self.prefill(Request("warm-up", (0,)), 0):
            pass

    async def status(self) -> EngineStatus:
        """Return a snapshot."""
        return await self._local.status()

    async def close(self, drain_s: float = 0.0) -> None:
        """See `LocalEngineClient.close`."""
        await self._local.close(drain_s)


def _set(future: asyncio.Future[TokenChunk], chunk: TokenChunk) -> None:
    if not future.done():
        future.set_result(chunk)
