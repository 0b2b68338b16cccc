"""`PrefillClient`: the client of an engine that computes prompts for other engines.

event loop                                      engine thread
prefill ── submit ────────────────────────────▶ steps … last chunk ─▶ claim of the pages is kept
  ▲                                               │ launched            │
  ├── written to the reader's room, layer by layer ◀                    │
  └── or, when they are computed: written, or read part by part ◀───────┘
      on a worker thread

The reader claims its room while the prompt is computed. A GPU copies each layer while it computes
the next ones, where steps are launched ahead of their results.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

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
    from llm import LaunchedPages, LayerMarks, PageClaim, PageTransfer, PeerPool

logger = logging.getLogger("tts.engine")

T = TypeVar("T")

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


class _WrittenPages(NamedTuple):
    """The pages that a reader misses: whether its pool has them, and their digest if it is sent."""

    pages: tuple[int, ...]
    is_written: bool = False
    digest: int | None = None


class _Prompt:
    """A prompt that is computed. Its methods run on the engine's thread, its futures belong to the
    event loop.
    """

    def __init__(self, transfer: PageTransfer, request: Request, name: str) -> None:
        """`name`: of the claim that is kept."""
        self._transfer, self._request, self.name = transfer, request, name
        self._loop = loop = asyncio.get_running_loop()
        self.launched: asyncio.Future[LaunchedPages] = loop.create_future()
        self.ended: asyncio.Future[TokenChunk] = loop.create_future()
        self.claims: list[PageClaim] = []  # at most one

    def on_launched(self, pages: Sequence[int]) -> None:
        """Note the pages that a step completes."""
        with suppress(RuntimeError):  # the loop is closed, or the device has failed
            found = self._transfer.launched(pages, self._request)
            self._loop.call_soon_threadsafe(_set, self.launched, found)

    def on_tokens(self, chunk: TokenChunk) -> None:
        """Keep the pages of a prompt that has ended."""
        try:
            if chunk.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.claims.append(self._transfer.kept(self.name, self._request))
        finally:
            if chunk.finish_reason is not None:
                with suppress(RuntimeError):  # the loop is closed, so no reader is left
                    self._loop.call_soon_threadsafe(_set, self.ended, chunk)


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
        prompt = _Prompt(self._transfer, request, f"pages {next(self._names)}")
        on_launched = prompt.on_launched if self._transfer.writes_early else None
        self._engine.submit(request, prompt.on_tokens, kept_as=prompt.name, on_launched=on_launched)
        num_read = 0
        try:
            written = await self._written(prompt, room)
            chunk = prompt.ended.result()
            # A stop id is sampled again by the reader, which ends the request.
            is_used = sampling is not None and chunk.finish_reason is FinishReason.LENGTH
            token = next(iter(chunk.token_ids), None) if is_used else None
            async for part in self._parts(written, token):
                num_read += part.num_pages
                yield part
        finally:
            self._release(request.request_id, prompt.claims, num_read)

    async def _written(
        self, prompt: _Prompt, room: Callable[[], Awaitable[PeerRoom]]
    ) -> _WrittenPages:
        """Wait for a prompt and the reader's room, and write what the reader misses if possible."""
        ended, launched = prompt.ended, prompt.launched
        await asyncio.wait((launched, ended), return_when=asyncio.FIRST_COMPLETED)
        target, early = None, _WrittenPages(())
        if launched.done() and not ended.done():
            target = await room()
            pages, stored = launched.result()
            early = await self._write(pages[target.first_page :], target, stored)
        chunk = await ended
        if chunk.finish_reason is FinishReason.ERROR:
            raise SynthesisError(f"the prompt was not computed: {chunk.error}")
        if target is None:
            target = await room()
        pages = prompt.claims[0].pages[target.first_page :] if prompt.claims else ()
        if early.is_written and early.pages == pages:
            return early
        return await self._write(pages, target)

    async def _parts(
        self, found: _WrittenPages, token: Token | None
    ) -> AsyncGenerator[PagePart, None]:
        pages, is_written, digest = found
        if is_written or not pages:
            yield PagePart(len(pages), NO_CONTENT, is_written, True, token, digest)
            return
        size = self._transfer.part_pages
        for first in range(0, len(pages), size):
            part = pages[first : first + size]
            content = await asyncio.to_thread(self._transfer.read, part)
            is_last = first + size >= len(pages)
            yield PagePart(len(part), content, False, is_last, token if is_last else None)

    async def _write(
        self, pages: tuple[int, ...], target: PeerRoom, stored: LayerMarks | None = None
    ) -> _WrittenPages:
        """Copy pages to the reader's pool, where it has one that this process can map.

        A cancellation takes effect when nothing is written any more.
        """
        pool = target.pool
        if pool is None or not pages:
            return _WrittenPages(pages)
        write = partial(self._write_now, pages, pool, target, stored)
        writing = asyncio.ensure_future(asyncio.to_thread(write))
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
        self,
        pages: tuple[int, ...],
        handle: PoolHandle,
        target: PeerRoom,
        stored: LayerMarks | None,
    ) -> _WrittenPages:
        peers = self._peers
        is_new = handle not in peers and len(peers) < MAX_PEERS
        try:
            if is_new:
                peers[handle] = self._transfer.open_peer(handle)
            peer = peers.get(handle)
            if peer is None:
                return _WrittenPages(pages)
            self._transfer.write_to(peer, target.pages, pages, stored)
        except (RuntimeError, ValueError, OSError) as error:
            logger.warning("pages go over the host's memory: %s", error)
            peers[handle] = None
            return _WrittenPages(pages)
        has_digest = is_new or target.wants_digest
        return _WrittenPages(pages, True, self._transfer.digest(pages) if has_digest else None)

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


def _set(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)
