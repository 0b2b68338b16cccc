"""`DecodeClient`: the client of an engine that decodes, and has prompts computed by other engines.

    request ─▶ Prefill to an engine ─▶ claim of pages for what is not cached ─▶ Room ─▶ Pages …
            ─▶ the request, which has the claim then, and the first token

The claim waits for the engine's thread, about a step, while the prompt is computed. It comes first
where the cache may have the whole prompt, and while another claim waits.

An engine of the same machine writes the pages into this engine's pool; its answer says that it has.
Pages that it may still write are not used for anything else: see `_release_later`.

A prompt needs no other engine: what none of them has sent is computed here. So an engine that is
lost, or refuses, delays a request and never fails it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from decoder import CodecSpec
from llm import (
    ConfigError,
    EngineStoppedError,
    LLMError,
    PoolHandle,
    ReceivedPrompt,
    Request,
    Token,
    TokenChunk,
)
from tts.engine.client import AudioBlock, EncodedClip, Hold, SpeechJob
from tts.engine.local_client import LocalEngineClient
from tts.errors import EngineLostError, TTSError
from tts.ipc.endpoints import Endpoints
from tts.ipc.inbox import Inbox
from tts.ipc.messages import Pages
from tts.ipc.remote_client import RemoteEngineClient, RemotePrompt
from tts.ipc.replicas import KEY_TOKENS, Load, choose, preferred_of
from tts.ipc.sockets import MAX_MESSAGE_BYTES
from tts.observe.engine_status import EngineStatus

if TYPE_CHECKING:
    from llm import PageClaim

logger = logging.getLogger("tts.ipc")

MESSAGE_SPARE_BYTES = 1024  # of a message, in addition to the content of a page
CONNECT_S = 10.0  # time for engines to answer at the start; later ones are used from then on
ROOM_S = 0.01  # between two attempts to claim pages
LONGEST_WAIT_S = 2.0  # for room; then the prompt waits in the scheduler and is computed here
SHUT_S = 0.02  # between two attempts to end the writes of another engine
TEARDOWN_S = 1.0  # for the driver to end the work of a process that has ended
ANSWER_S = 60.0  # for the next pages of a prompt; then they are computed here
FALLBACK_LOG_S = 10.0  # between two warnings about prompts that are computed here


@dataclass(slots=True)
class _Transfer:
    """One prompt's transfer. `claim` belongs to the engine's thread until the room is found."""

    claim: PageClaim | None = None
    num_written: int = 0
    token: Token | None = None
    received: ReceivedPrompt | None = None  # what the request takes over

    @property
    def missing(self) -> tuple[int, ...]:
        """Pages that were neither cached nor received."""
        claim = self.claim
        return () if claim is None else claim.pages[claim.num_cached + self.num_written :]


class DecodeClient:
    """`EngineClient` of an engine with `transfer`, and of the engines that compute its prompts.

    `connect` returns a connected client, which owns the local one. One event loop.
    """

    def __init__(
        self,
        local: LocalEngineClient,
        endpoints: Sequence[Endpoints],
        watermark: float = 1.0,
    ) -> None:
        """Claims of prompts wait while they would use more than `watermark` of the pages.

        `endpoints`: of the engines for prompts, by the format of the pages.
        """
        transfer = local.engine.transfer
        assert transfer is not None  # an engine of this role has it
        self._local, self._engine, self._transfer = local, local.engine, transfer
        name = f"decode-{os.getpid()}"
        self._prefills = tuple(RemoteEngineClient(each, name) for each in endpoints)
        self._bases, self._watermark = tuple(each.base for each in endpoints), watermark
        self._num_open = [0] * len(self._prefills)
        self._pools: dict[int, PoolHandle | None] = {}  # for each engine
        self._proven: set[int] = set()  # engines whose writes have arrived in the pool
        self._releasing: set[asyncio.Task[None]] = set()
        self._num_fetching = self._num_claiming = 0
        self._names = itertools.count()
        self._full = asyncio.Lock()  # held while a claim waits for room; the others wait in order
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="pages")
        self._starting: list[asyncio.Task[None]] = []
        self._warned_s = float("-inf")

    @classmethod
    async def connect(
        cls, local: LocalEngineClient, bases: Sequence[str], watermark: float = 1.0
    ) -> DecodeClient:
        """Connect to the engines at these bases; wait for their answers for a limited time.

        Raises ConfigError for an engine whose pages cannot be used here.
        """
        transfer = local.engine.transfer
        assert transfer is not None
        if transfer.page_bytes > MAX_MESSAGE_BYTES - MESSAGE_SPARE_BYTES:
            raise ConfigError(
                f"a KV page has {transfer.page_bytes} bytes, too many for one message of an engine "
                "for prompts; a smaller model.kv_cache.kv_cache_page_size makes it smaller"
            )
        own = str(transfer.format)
        endpoints = [Endpoints.of(base, own, by_format=True) for base in bases]
        client = cls(local, endpoints, watermark)
        client._starting = [asyncio.create_task(each.start()) for each in client._prefills]
        try:
            started, late = await asyncio.wait(
                client._starting, timeout=CONNECT_S, return_when=asyncio.FIRST_EXCEPTION
            )
            for start in started:
                start.result()
        except BaseException:
            await client.close()
            raise
        for start in late:
            start.add_done_callback(_report)
        if late:
            text = (
                "%d of %d engines for prompts do not answer; prompts are computed here until then"
            )
            logger.warning(text, len(late), len(client._prefills))
        return client

    def __repr__(self) -> str:
        return f"DecodeClient({self._local!r}, {', '.join(map(repr, self._prefills))})"

    @property
    def codec(self) -> CodecSpec | None:
        """Specification of the codec; None for a text-only model."""
        return self._local.codec

    async def generate(
        self, request: Request, hold: Hold | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Stream a text request; see `LocalEngineClient.generate`."""
        arrival_s = time.monotonic()
        async with (
            self._fetched(request) as received,
            aclosing(self._local.generate(request, hold, arrival_s, received)) as chunks,
        ):
            async for chunk in chunks:
                yield chunk

    async def speak(self, job: SpeechJob) -> AsyncGenerator[AudioBlock, None]:
        """Stream a speech job; see `LocalEngineClient.speak`."""
        arrival_s = time.monotonic()
        async with (
            self._fetched(job.request) as received,
            aclosing(self._local.speak(job, arrival_s, received)) as blocks,
        ):
            async for block in blocks:
                yield block

    async def encode_prompt(self, samples: np.ndarray) -> EncodedClip:
        """Encode a reference clip; see `LocalEngineClient.encode_prompt`."""
        return await self._local.encode_prompt(samples)

    async def status(self) -> EngineStatus:
        """Return a snapshot of the local engine; prompts whose pages are awaited are waiting."""
        status = await self._local.status()
        return replace(status, waiting=status.waiting + self._num_fetching)

    async def close(self, drain_s: float = 0.0) -> None:
        """Disconnect from the other engines, and close the local client."""
        for task in (*self._starting, *self._releasing):
            task.cancel()
        await asyncio.gather(*self._starting, *self._releasing, return_exceptions=True)
        await asyncio.gather(*(prefill.close() for prefill in self._prefills))
        await self._local.close(drain_s)
        self._writer.shutdown()

    @asynccontextmanager
    async def _fetched(self, request: Request) -> AsyncIterator[ReceivedPrompt | None]:
        """Have the pages of a prompt computed and received as far as possible; release them at the
        end of the block if no engine has taken the request.
        """
        if not self._is_fetched(request):
            yield None
            return
        transfer = _Transfer()
        try:
            self._num_fetching += 1
            try:
                await self._receive(transfer, request)
            finally:
                self._num_fetching -= 1
            claim = transfer.claim
            if claim is not None:
                written, token = transfer.num_written, transfer.token
                transfer.received = self._transfer.received(claim, written, token)
            else:  # one that comes too late would hold what the prompt waits for
                self._post(partial(self._release, transfer))
            yield transfer.received
        finally:
            if transfer.received is None or not transfer.received.is_taken:
                # Behind a write that is in progress, and behind the claim.
                self._writer.submit(self._post, partial(self._release, transfer))

    def _is_fetched(self, request: Request) -> bool:
        """Whether another engine may compute a prompt."""
        if request.embeds or request.sampling.echo:
            return False  # each of its tokens is needed in a step
        if request.lora:
            return False  # another engine's adapter of this name may be another one
        return self._transfer.is_worthwhile(request) and self._transfer.fits(request)

    async def _claim(self, transfer: _Transfer, request: Request) -> None:
        """Claim the prompt's pages; wait while there is no room, but not for ever: paused sequences
        may have the pages, which the scheduler can take from them, and a claim here cannot.
        """
        name = f"prompt {next(self._names)}"

        def claim() -> None:
            transfer.claim = self._transfer.claim(name, request, self._watermark)

        async def is_claimed() -> bool:
            await asyncio.wrap_future(self._engine.run_on_engine(claim))
            return transfer.claim is not None

        self._num_claiming += 1
        try:
            if self._full.locked() or not await is_claimed():
                with suppress(TimeoutError):
                    async with asyncio.timeout(LONGEST_WAIT_S), self._full:
                        while not await is_claimed():
                            await asyncio.sleep(ROOM_S)
            if not self._transfer.is_room_free:
                await asyncio.to_thread(self._transfer.wait_for_room)
        finally:
            self._num_claiming -= 1

    def _release(self, transfer: _Transfer) -> None:
        claim, transfer.claim = transfer.claim, None
        if claim is not None:
            self._transfer.release(claim, num_written=transfer.num_written)

    def _post(self, command: Callable[[], None]) -> None:
        with suppress(EngineStoppedError):
            self._engine.run_on_engine(command)

    async def _receive(self, transfer: _Transfer, request: Request) -> None:
        """Receive the missing pages, from one engine after the other if they are lost."""
        tried: set[int] = set()
        while True:
            claim = transfer.claim
            num_known = 0 if claim is None else claim.num_cached + transfer.num_written
            if not self._transfer.is_worthwhile(request, num_known):
                return
            number = self._choose(request, tried)
            if number is None:
                self._warn("no engine for prompts is there")
                return
            pool = await self._pool_for(number)
            if claim is None and self._claims_first(request):
                await self._claim(transfer, request)
                if transfer.claim is None:
                    return
                continue
            tried.add(number)
            self._num_open[number] += 1
            try:
                await self._receive_from(number, pool, transfer, request)
                return
            except (LLMError, TTSError, ValueError, RuntimeError, OSError) as error:
                self._warn(f"engine {number} for prompts: {error}")
            finally:
                self._num_open[number] -= 1

    def _claims_first(self, request: Request) -> bool:
        """Whether a prompt is claimed before it is sent: what is cached need not be computed, and
        of those without room only one should hold pages of the other engine.
        """
        num_cached = self._transfer.num_cached(request)
        return self._num_claiming > 0 or not self._transfer.is_worthwhile(request, num_cached)

    async def _receive_from(
        self, number: int, pool: PoolHandle | None, transfer: _Transfer, request: Request
    ) -> None:
        """Have one engine compute a prompt, claim its pages meanwhile, and receive what is missing.
        Ends without pages if there is no room, or if they are cached by now.

        Raises the engine's errors, and ValueError for wrong pages.
        """
        async with self._prefills[number].prefill(request) as prompt:
            if transfer.claim is None:
                await self._claim(transfer, request)
            claim = transfer.claim
            if claim is not None and self._transfer.is_worthwhile(request, claim.num_cached):
                await self._take(number, pool, transfer, prompt)

    async def _take(
        self, number: int, pool: PoolHandle | None, transfer: _Transfer, prompt: RemotePrompt
    ) -> None:
        """Receive the missing pages: an engine writes them to the pool, or sends their content."""
        assert transfer.claim is not None
        loop, inbox, is_held = asyncio.get_running_loop(), Inbox(self._transfer.part_bytes), False
        if not inbox.path:
            pool = None  # the end of a write could not be noticed
        missing, is_proven = transfer.missing, number in self._proven
        targets = () if pool is None else missing
        answers = prompt.pages(
            len(transfer.claim.pages) - len(missing),
            inbox.path,
            pool,
            targets,
            wants_digest=pool is not None and not is_proven,
        )
        try:
            async with asyncio.timeout(ANSWER_S) as limit, aclosing(answers):
                async for pages in answers:
                    limit.reschedule(loop.time() + ANSWER_S)
                    if pages.is_written:
                        _check_written(pages, targets)
                        if not is_proven or pages.digest is not None:
                            await self._check_digest(number, pages, missing)
                    else:
                        store = partial(self._store, transfer.missing, pages, inbox)
                        await loop.run_in_executor(self._writer, store)
                    transfer.num_written += pages.num_pages
                    transfer.token = pages.token
        except BaseException as error:
            if pool is not None and prompt.has_room:
                is_lost = isinstance(error, EngineLostError)
                is_held = self._end_writes(transfer, inbox, is_lost=is_lost)
            raise
        finally:
            if not is_held:
                loop.call_soon(inbox.close)  # behind the first token

    def _end_writes(self, transfer: _Transfer, inbox: Inbox, *, is_lost: bool) -> bool:
        """Keep an engine from writing to the pool; return whether it may be writing. Then the claim
        and the inbox are left to `_release_later`. `is_lost`: its process may have ended, whose
        last copies on a GPU end later.
        """
        if inbox.shut() and not (is_lost and self._transfer.is_on_gpu):
            return False
        left = replace(transfer)
        transfer.claim, transfer.num_written, transfer.token = None, 0, None
        task = asyncio.create_task(self._release_later(left, inbox))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)
        return True

    async def _release_later(self, transfer: _Transfer, inbox: Inbox) -> None:
        """Release a claim once its pages are certainly not written any more: when the other engine
        has closed the request, or its process has ended.
        """
        try:
            while not inbox.shut():
                await asyncio.sleep(SHUT_S)
            if self._transfer.is_on_gpu:
                await asyncio.sleep(TEARDOWN_S)
            self._writer.submit(self._post, partial(self._release, transfer))
        finally:
            inbox.close()

    async def _pool_for(self, number: int) -> PoolHandle | None:
        """Return the pool for an engine that may write to it; None where it cannot."""
        if not self._bases[number].startswith("ipc://"):
            return None
        if number not in self._pools:
            share = self._engine.run_on_engine(self._transfer.share)
            try:
                self._pools[number] = await asyncio.wrap_future(share)
            except RuntimeError as error:
                logger.warning("pages come over the host's memory: %s", error)
                self._pools[number] = None
        return self._pools[number]

    async def _check_digest(self, number: int, pages: Pages, missing: tuple[int, ...]) -> None:
        """Compare what an engine has written with what it has read, until this was right once.

        Between some GPUs copies arrive incomplete without an error. Raises ValueError, and has the
        engine write to this pool no more.
        """
        found = await asyncio.to_thread(self._transfer.digest, missing)
        if found != pages.digest:
            self._pools[number] = None
            raise ValueError("its pages did not arrive in this engine's pool as they were sent")
        self._proven.add(number)

    def _store(self, missing: tuple[int, ...], pages: Pages, inbox: Inbox) -> None:
        """Write received pages to the pool; on the writer's thread."""
        transfer, count = self._transfer, pages.num_pages
        if not 0 <= count <= min(len(missing), transfer.part_pages):
            raise ValueError(f"{count} pages were sent, {len(missing)} are missing")
        if not count:
            return
        if pages.num_bytes != count * transfer.page_bytes:
            raise ValueError(f"{pages.num_bytes} bytes for {count} pages")
        content = transfer.buffer(count)
        if pages.slot >= 0:
            inbox.read(pages.slot, content)
        else:
            content[:] = np.frombuffer(pages.data, np.uint8)
        transfer.write(missing[:count], content)

    def _choose(self, request: Request, tried: set[int]) -> int | None:
        """Return the number of the engine for a prompt, as a replica is chosen; None without one
        that takes work.
        """
        loads = {
            number: Load(self._num_open[number], prefill.num_sequences)
            for number, prefill in enumerate(self._prefills)
            if number not in tried and prefill.takes_work
        }
        key = request.prompt_ids[:KEY_TOKENS]
        return choose(preferred_of(key, len(self._prefills)), loads) if loads else None

    def _warn(self, reason: str) -> None:
        """Log that a prompt is computed here, now and then."""
        now_s = time.monotonic()
        if now_s - self._warned_s >= FALLBACK_LOG_S:
            self._warned_s = now_s
            logger.warning("%s; what it has not sent is computed here", reason)


def _check_written(pages: Pages, missing: tuple[int, ...]) -> None:
    """Raise ValueError unless an engine says that it has written the missing pages."""
    if pages.num_pages != len(missing):
        raise ValueError(f"{pages.num_pages} pages were written, {len(missing)} are missing")


def _report(start: asyncio.Task[None]) -> None:
    """Log why an engine did not join."""
    error = None if start.cancelled() else start.exception()
    if error is not None:
        logger.error("%s", error)
