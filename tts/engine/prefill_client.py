"""`PrefillClient`: the client of an engine that computes prompts for other engines.

event loop                                      engine thread
prefill ── submit ────────────────────────────▶ steps … last chunk ─▶ claim of the pages is kept
  ▲                                                                     │
  └── written to the reader's room, or read part by part ◀──────────────┘
      on a worker thread

The reader claims its room while the prompt is computed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from llm import (
    EngineStoppedError,
    FinishReason,
    PoolHandle,
    Request,
    SamplingParams,
    Token,
    TokenChunk,
)
from tts.engine.client import AudioBlock, EncodedClip, Hold, SpeechJob
from tts.engine.local_client import LocalEngineClient
from tts.errors import NotAvailableError, SynthesisError
from tts.observe.engine_status import EngineStatus

if TYPE_CHECKING:
    from llm import PageClaim, PeerPool

logger = logging.getLogger("tts.engine")

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
"""A prompt without generation: its one token is not used."""

NUM_SLOTS = 5
"""Slots of a reader's inbox, used in turn: one more than it lets be unread, as the next part is
written before it may be sent."""
MAX_PEERS = 16  # pools of readers that stay mapped
NO_CONTENT = np.empty(0, np.uint8)


class PeerRoom(NamedTuple):
    """Room of a reader, which has the pages before `first_page`.

    `pool` has `pages` for the others; None: they are read. `wants_digest`: the reader compares what
    arrives.
    """

    first_page: int
    pool: PoolHandle | None = None
    pages: tuple[int, ...] = ()
    wants_digest: bool = False


class PagePart(NamedTuple):
    """The next pages of a prompt: their content, or (`is_written`) the reader's pool has it.

    The last part has the first token of the answer, if it was sampled as the request says. Those
    that are written to a pool have a `PageTransfer.digest` the first time, and if one is wanted.
    """

    num_pages: int
    content: np.ndarray
    is_written: bool = False
    is_last: bool = False
    token: Token | None = None
    digest: int | None = None


class PrefillClient:
    """`EngineClient` that refuses what generates, and has `prefill`. It owns the local client."""

    codec = None

    def __init__(self, local: LocalEngineClient) -> None:
        """`local`: client of an engine with `transfer`."""
        transfer = local.engine.transfer
        assert transfer is not None  # an engine of this role has it
        self._local, self._engine, self._transfer = local, local.engine, transfer
        self._names = itertools.count()
        self._peers: dict[PoolHandle, PeerPool | None] = {}  # None: it cannot be used

    def __repr__(self) -> str:
        return f"PrefillClient({self._local!r})"

    @property
    def page_format(self) -> str:
        """The format of the pages, as text: engines with the same can use them."""
        return str(self._transfer.format)

    async def prefill(
        self, request: Request, room: Callable[[], Awaitable[PeerRoom]]
    ) -> AsyncGenerator[PagePart, None]:
        """Compute a prompt, await the reader's room, and stream the pages that the reader misses;
        the last part may be empty.

        They are written to the room's pool where this process can map it. The pages are held until
        the iterator is closed, which also cancels the computation; nothing is written afterwards.
        Raises the errors of `Engine.submit` and of `room`, and SynthesisError when a step fails.
        """
        sampling = first_token_sampling(request.sampling)
        request = replace(request, sampling=sampling or ONE_TOKEN)
        name = f"pages {next(self._names)}"
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[TokenChunk] = loop.create_future()
        claims: list[PageClaim] = []  # of the engine's thread; at most one

        def on_tokens(chunk: TokenChunk) -> None:
            try:
                if chunk.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    claims.append(self._transfer.kept(name, request))
            finally:
                if chunk.finish_reason is not None:
                    with suppress(RuntimeError):  # the loop is closed, so no reader is left
                        loop.call_soon_threadsafe(_set, ended, chunk)

        self._engine.submit(request, on_tokens, kept_as=name)
        num_read = 0
        try:
            chunk = await ended
            if chunk.finish_reason is FinishReason.ERROR:
                raise SynthesisError(f"the prompt was not computed: {chunk.error}")
            target = await room()
            pages = claims[0].pages[target.first_page :] if claims else ()
            # A stop id is sampled again by the reader, which ends the request.
            is_used = sampling is not None and chunk.finish_reason is FinishReason.LENGTH
            token = next(iter(chunk.token_ids), None) if is_used else None
            async for part in self._parts(pages, target, token):
                num_read += part.num_pages
                yield part
        finally:
            self._release(request.request_id, claims, num_read)

    async def _parts(
        self, pages: tuple[int, ...], target: PeerRoom, token: Token | None
    ) -> AsyncGenerator[PagePart, None]:
        if not pages:
            yield PagePart(0, NO_CONTENT, is_last=True, token=token)
            return
        is_written, digest = False, None
        if target.pool is not None:
            is_written, digest = await self._write(pages, target.pool, target)
        if is_written:
            yield PagePart(len(pages), NO_CONTENT, True, True, token, digest)
            return
        size = self._transfer.part_pages
        for first in range(0, len(pages), size):
            part = pages[first : first + size]
            content = await asyncio.to_thread(self._transfer.read, part)
            is_last = first + size >= len(pages)
            yield PagePart(len(part), content, False, is_last, token if is_last else None)

    async def _write(
        self, pages: tuple[int, ...], pool: PoolHandle, target: PeerRoom
    ) -> tuple[bool, int | None]:
        """Copy pages to the reader's pool; return whether this is possible, and the digest.

        A cancellation takes effect when nothing is written any more.
        """
        writing = asyncio.ensure_future(asyncio.to_thread(self._write_now, pages, pool, target))
        cancelled = None
        while not writing.done():
            try:
                await asyncio.wait((writing,))
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return writing.result()

    def _write_now(
        self, pages: tuple[int, ...], handle: PoolHandle, target: PeerRoom
    ) -> tuple[bool, int | None]:
        peers = self._peers
        is_new = handle not in peers and len(peers) < MAX_PEERS
        try:
            if is_new:
                peers[handle] = self._transfer.open_peer(handle)
            peer = peers.get(handle)
            if peer is None:
                return False, None
            self._transfer.write_to(peer, target.pages, pages)
        except (RuntimeError, ValueError, OSError) as error:
            logger.warning("pages go over the host's memory: %s", error)
            peers[handle] = None
            return False, None
        has_digest = is_new or target.wants_digest
        return True, self._transfer.digest(pages) if has_digest else None

    def unmap(self, pool: PoolHandle) -> None:
        """Unmap a reader's pool, which no request names any more."""
        self._peers.pop(pool, None)

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

        async def room() -> PeerRoom:
            return PeerRoom(0)

        async for _ in self.prefill(Request("warm-up", (0,)), room):
            pass

    async def status(self) -> EngineStatus:
        """Return a snapshot."""
        return await self._local.status()

    async def close(self, drain_s: float = 0.0) -> None:
        """See `LocalEngineClient.close`."""
        await self._local.close(drain_s)


def first_token_sampling(sampling: SamplingParams) -> SamplingParams | None:
    """Return the parameters for a request's first token alone; None where it needs more than the
    prompt, or the answer more than the token.
    """
    if sampling.json_schema or sampling.top_logprobs is not None:
        return None
    return replace(
        sampling,
        max_tokens=1,
        min_tokens=min(sampling.min_tokens, 1),
        # Penalties are those of generated tokens, and there is none.
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
    )


def _set(future: asyncio.Future[TokenChunk], chunk: TokenChunk) -> None:
    if not future.done():
        future.set_result(chunk)
