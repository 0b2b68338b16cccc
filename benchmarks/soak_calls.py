"""Clients of a soak test: every kind of call, valid or not, with its recorded end.

Each makes one call after the other until the end of the test. A speech client waits until its audio
would have been played, so that the number of clients is the number of real-time streams.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import grpc

from benchmarks.first_audio import TEXTS
from benchmarks.soak_ledger import CANCELLED, OK, VANISHED, CallRecord
from benchmarks.soak_vanish import NUM_CALLS
from tts.v1 import common_pb2, speech_pb2, speech_pb2_grpc, text_pb2, text_pb2_grpc

PATIENCE_S = 120.0  # for one call: a longer one counts as lost
MAX_CODES = 250  # maximum length of one sentence
TEXT_TOKENS = 64
PROMPT_TOKENS, ANY_IDS = 513, range(32, 127)
CHANNELS = 4
LINGER_S = 1.0  # pause after a call that failed
LEAVES_WITHIN_S = 1.0
SLOW_READER_S = 3.0  # the server's slow_reader_timeout_s
WRONG = ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED")
CLIP = TEXTS[0] * 2
CLIP_TOKENS = 100  # a second or more of any codec; random weights may end at once, or late
LONG = " ".join(TEXTS) * 3
OWN_CHANNEL = ("grpc.use_local_subchannel_pool", 1)
SMALL_WINDOW = ("grpc.http2.bdp_probe", 0)  # fixes HTTP/2's window at 64 KiB

Work = Callable[[Random], Awaitable[None]]


class Clients:
    """Makes and records calls to one server. `pause_s`: between unusual calls."""

    def __init__(self, address: str, pause_s: float) -> None:
        self._address, self._pause_s = address, pause_s
        channels = [grpc.aio.insecure_channel(address, (OWN_CHANNEL,)) for _ in range(CHANNELS)]
        self._channels, self._turns = channels, itertools.cycle(channels)
        self._numbers = itertools.count()
        self._stopping = asyncio.Event()
        self._clip = b""
        self.calls: list[CallRecord] = []

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            await channel.close()

    async def prepare(self) -> None:
        """Synthesize the clip that voices are cloned from."""
        async with self._asked("unary") as asked:
            config = _config(asked)
            config.sampling.min_tokens = config.sampling.max_tokens = CLIP_TOKENS
            config.audio_format.encoding = speech_pb2.AUDIO_ENCODING_WAV
            request = speech_pb2.SynthesizeRequest(config=config, input=_spoken(CLIP))
            self._clip = (await _answer(asked, self._speech().Synthesize(request))).audio

    async def fill(self, prompts: int) -> None:
        """Fill the prefix cache with different prompts of PROMPT_TOKENS."""
        random = Random(0)
        stub = text_pb2_grpc.TextServiceStub(next(self._turns))
        for _ in range(prompts):
            ids = [random.choice(ANY_IDS) for _ in range(PROMPT_TOKENS)]
            request = text_pb2.GenerateRequest(
                input=text_pb2.GenerationInput(token_ids=text_pb2.TokenIds(ids=ids))
            )
            request.config.sampling.max_tokens = 1
            await stub.Generate(request)

    async def run(self, listeners: int, seconds: float) -> None:
        """Run so many speech clients and the others for so long; then wait for the last calls."""
        self._stopping.clear()
        clients = [self._client(self.listen, seed, 0.0) for seed in range(listeners)]
        clients += [
            self._client(self.write, 1000 + number, self._pause_s / 10)
            for number in range(max(1, listeners // 4))
        ]
        beside = (self.clone, self.be_wrong, self.read_nothing, self.close_channel, self.be_killed)
        clients += [self._client(work, 2000 + n, self._pause_s) for n, work in enumerate(beside)]
        running = asyncio.gather(*clients)
        await asyncio.wait((running,), timeout=seconds)
        self._stopping.set()
        await running

    async def _client(self, work: Work, seed: int, pause_s: float) -> None:
        random = Random(seed)
        while not self._stopping.is_set():
            await work(random)
            await self._wait(random.uniform(0.5, 1.5) * pause_s)

    async def _wait(self, seconds: float) -> None:
        """Wait so long, unless the test ends."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), max(0.0, seconds))

    @asynccontextmanager
    async def _asked(self, kind: str, *expected: str) -> AsyncIterator[CallRecord]:
        """Record one call: it ends with the block unless another end was recorded."""
        request_id = f"soak-{next(self._numbers)}"
        asked = CallRecord(kind, request_id, frozenset(expected or (OK,)))
        self.calls.append(asked)
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield asked
            asked.end(OK)
        except TimeoutError:
            return  # it has no end
        except grpc.aio.AioRpcError as error:
            asked.fail(error)
        if asked.code not in asked.expected:
            await self._wait(LINGER_S)

    def _speech(self) -> Any:
        return speech_pb2_grpc.SpeechServiceStub(next(self._turns))

    # --- listeners

    async def listen(self, random: Random) -> None:
        """Make one call for speech, and wait for the duration of its audio."""
        kinds: Mapping[Callable[[Random], Awaitable[CallRecord]], int] = {
            self.synthesize_unary: 3,
            self.synthesize_stream: 5,
            self.synthesize_typed: 3,
            self.read_slowly: 1,
            self.leave: 2,
        }
        (work,) = random.choices([*kinds], [*kinds.values()])
        asked = await work(random)
        await self._wait(asked.began_s + asked.audio_s - time.monotonic())

    async def synthesize_unary(self, random: Random) -> CallRecord:
        """Synthesize in a unary call."""
        async with self._asked("unary") as asked:
            request = speech_pb2.SynthesizeRequest(
                config=_config(asked, random), input=_spoken(random.choice(TEXTS))
            )
            response = await _answer(asked, self._speech().Synthesize(request))
            asked.record_audio()
            asked.audio_s = _seconds(response.done)
        return asked

    async def synthesize_stream(self, random: Random) -> CallRecord:
        """Synthesize in a streaming call."""
        async with self._asked("stream") as asked:
            await _read(asked, self._speech().SynthesizeStream(_request(asked, random)))
        return asked

    async def read_slowly(self, random: Random) -> CallRecord:
        """Synthesize in a streaming call, with pauses between the messages."""
        async with self._asked("slow") as asked:
            call = self._speech().SynthesizeStream(_request(asked, random))
            await _read(asked, call, random.uniform(0.1, 0.5))
        return asked

    async def synthesize_typed(self, random: Random) -> CallRecord:
        """Send text in pieces, receive streamed audio."""
        async with self._asked("typed") as asked:
            await _read(asked, self._speech().StreamingSynthesize(_typed(asked, random)))
        return asked

    async def leave(self, random: Random) -> CallRecord:
        """Cancel at a random time, before the first audio or after."""
        async with self._asked("cancelled", OK, CANCELLED) as asked:
            call = self._speech().SynthesizeStream(_request(asked, random, LONG))
            await _leave(asked, call, random)
        return asked

    # --- other clients

    async def write(self, random: Random) -> None:
        """Generate text, whole, streamed or cancelled."""
        stub = text_pb2_grpc.TextServiceStub(next(self._turns))
        kind = random.choice(("text", "text", "text stream", "text cancelled"))
        expected = (OK, CANCELLED) if kind == "text cancelled" else (OK,)
        async with self._asked(kind, *expected) as asked:
            config = text_pb2.GenerationConfig(request_id=asked.request_id)
            config.sampling.max_tokens = random.randint(1, TEXT_TOKENS)
            prompt = text_pb2.GenerationInput(prompt=random.choice(TEXTS))
            if kind == "text":
                await _answer(
                    asked, stub.Generate(text_pb2.GenerateRequest(config=config, input=prompt))
                )
                return
            call = stub.GenerateStream(text_pb2.GenerateStreamRequest(config=config, input=prompt))
            if kind == "text cancelled":
                await _leave(asked, call, random)
            else:
                await _read(asked, call)

    async def clone(self, random: Random) -> None:
        """Create a voice from a clip, synthesize with it, delete it; then using it must fail."""
        name = f"voice-{next(self._numbers)}"
        prompt = speech_pb2.VoicePrompt(audio=self._clip, transcript=CLIP)
        stub = self._speech()
        async with self._asked("create voice") as asked:
            request = speech_pb2.CreateVoiceRequest(voice_id=name, prompt=prompt, consent="own")
            await _answer(asked, stub.CreateVoice(request))
        if asked.code != OK:
            return
        async with self._asked("cloned") as asked:
            await _read(asked, stub.SynthesizeStream(_request(asked, random, voice=name)))
        async with self._asked("delete voice") as asked:
            await _answer(asked, stub.DeleteVoice(speech_pb2.DeleteVoiceRequest(name=name)))
        if asked.code != OK:
            return
        async with self._asked("deleted", "NOT_FOUND") as asked:
            await _read(asked, stub.SynthesizeStream(_request(asked, random, voice=name)))

    async def be_wrong(self, random: Random) -> None:
        """Send a request that must be refused."""
        async with self._asked("wrong", *WRONG) as asked:
            request = _request(asked, random)
            match random.randrange(4):
                case 0:
                    request.input.text = ""
                case 1:
                    request.config.speaking_rate = 9.0
                case 2:
                    request.input.ssml = "<speak><b>Hello.</b></speak>"
                case 3:
                    request.config.voice.name = "no such voice"
            await _read(asked, self._speech().SynthesizeStream(request))

    async def read_nothing(self, random: Random) -> None:
        """Request more audio than HTTP/2's window holds, without reading it.

        The server cancels such a call; audio that fits the window is sent completely.
        """
        async with (
            grpc.aio.insecure_channel(self._address, (OWN_CHANNEL, SMALL_WINDOW)) as channel,
            self._asked("unread", OK, "ABORTED") as asked,
        ):
            request = _request(asked, random, LONG)
            request.config.audio_format.encoding = speech_pb2.AUDIO_ENCODING_PCM_F32LE
            request.config.audio_format.sample_rate_hertz = 48_000
            call = speech_pb2_grpc.SpeechServiceStub(channel).SynthesizeStream(request)
            await anext(aiter(call))
            await self._wait(2 * SLOW_READER_S)
            await _read(asked, call)

    async def close_channel(self, random: Random) -> None:
        """Close the connection in the middle of a stream."""
        async with self._asked("channel closed", OK, CANCELLED, VANISHED) as asked:
            channel = grpc.aio.insecure_channel(self._address, (OWN_CHANNEL,))
            try:
                call = speech_pb2_grpc.SpeechServiceStub(channel).SynthesizeStream(
                    _request(asked, random, LONG)
                )
                await anext(aiter(call))
                await asyncio.sleep(random.uniform(0, LEAVES_WITHIN_S))
                asked.end(VANISHED)
            finally:
                await channel.close()

    async def be_killed(self, random: Random) -> None:
        """Kill a process with active calls: no cancellation is sent."""
        asked = {}
        for _ in range(NUM_CALLS):
            one = CallRecord("killed", f"soak-{next(self._numbers)}", frozenset({OK, VANISHED}))
            asked[one.request_id] = one
        command = (sys.executable, "-m", "benchmarks.soak_vanish", self._address, *asked)
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        for one in asked.values():
            one.began_s = time.monotonic()
        self.calls += asked.values()
        assert process.stdout is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                for _ in asked:  # a first message or an end of each
                    _note(asked, (await process.stdout.readline()).decode().split())
                await asyncio.sleep(random.uniform(0, LEAVES_WITHIN_S))
        with suppress(ProcessLookupError):  # all its calls may have ended
            process.kill()
        for line in (await process.stdout.read()).decode().splitlines():
            _note(asked, line.split())
        await process.wait()
        for one in asked.values():
            one.end(VANISHED)


def _note(asked: Mapping[str, CallRecord], words: list[str]) -> None:
    """Record the output of a process before it is killed: an id, or an id and a status."""
    if len(words) == 2:
        asked[words[0]].end(words[1])


def _spoken(text: str) -> speech_pb2.SynthesisInput:
    return speech_pb2.SynthesisInput(text=text)


def _config(
    asked: CallRecord, random: Random | None = None, voice: str = ""
) -> speech_pb2.SynthesisConfig:
    sampling = common_pb2.SamplingParams(max_tokens=MAX_CODES)
    if random is not None:
        sampling.seed = random.getrandbits(32)
    config = speech_pb2.SynthesisConfig(request_id=asked.request_id, sampling=sampling)
    if voice:
        config.voice.name = voice
    return config


def _request(
    asked: CallRecord, random: Random, text: str = "", voice: str = ""
) -> speech_pb2.SynthesizeStreamRequest:
    return speech_pb2.SynthesizeStreamRequest(
        config=_config(asked, random, voice), input=_spoken(text or random.choice(TEXTS))
    )


async def _typed(
    asked: CallRecord, random: Random
) -> AsyncIterator[speech_pb2.StreamingSynthesizeRequest]:
    """Send a sentence, word by word."""
    config = speech_pb2.StreamingSynthesizeConfig(synthesis=_config(asked, random))
    yield speech_pb2.StreamingSynthesizeRequest(config=config)
    for word in random.choice(TEXTS).split():
        yield speech_pb2.StreamingSynthesizeRequest(text=word + " ")
        await asyncio.sleep(random.uniform(0, 0.1))


async def _answer(asked: CallRecord, call: Any) -> Any:
    """Return a unary call's response."""
    response = await call
    asked.adopt(await call.trailing_metadata())
    return response


async def _read(asked: CallRecord, call: Any, pause_s: float = 0.0) -> None:
    """Read a stream to its end."""
    async for response in call:
        match response.WhichOneof("event"):
            case "audio":
                asked.record_audio()
            case "done":
                asked.audio_s = _seconds(response.done)
        if pause_s:
            await asyncio.sleep(pause_s)
    asked.adopt(await call.trailing_metadata())


def _seconds(done: Any) -> float:
    return float(done.usage.audio_duration.ToTimedelta().total_seconds())


async def _leave(asked: CallRecord, call: Any, random: Random) -> None:
    """Read for a moment, then cancel; a call may end before."""
    reading = asyncio.ensure_future(_read(asked, call))
    await asyncio.wait((reading,), timeout=random.uniform(0, LEAVES_WITHIN_S))
    if reading.done():
        reading.result()
        return
    asked.end(CANCELLED)
    call.cancel()
    with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await reading
