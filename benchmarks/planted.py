"""Failures planted in good speech below the check of segments: how many it finds and mends.

Hard texts (`benchmarks.hard_texts`) are spoken sentence by sentence in the voices of
`benchmarks.understood`. Between the engine and the check, a known share of all attempts, repeated
ones included, gets a fault: a word is cut out, a word is doubled, the end is cut off, or the speech
does not end. Which one depends on the attempt's seed alone. Codes and samples change together, so
the check and a recogniser get the same speech. The codes of each good first attempt are also given
to the check with more faults, for the shares that it finds.

With `--moonshine FOLDER` the recogniser counts the words that are missing or too many, in the
speech without faults, with faults, and with faults and the check (`benchmarks.speech_judges` says
what it needs). The check uses no recogniser.

`--cost` measures what the check costs instead: the first sound of a stream, and its own time.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from itertools import cycle
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.hard_texts import hard_texts
from benchmarks.report import Figure, Report, arguments, publish
from benchmarks.skipped import BAR_SHARE, Listener, total
from benchmarks.speech_judges import Recogniser, prepared
from benchmarks.understood import VOICES, Clip
from benchmarks.word_errors import Slips, slips
from decoder import AudioEncoding, CodecSpec
from llm import FinishReason, Request, TokenChunk
from tts.api.load import load_service
from tts.engine.client import AudioBlock, EncodedClip, EngineClient, Hold, SpeechJob
from tts.factory import Service
from tts.observe.engine_status import EngineStatus
from tts.speech.aligner import Aligner, letter_labels
from tts.speech.check import CheckResult, check_segment
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import AudioChunk, ChunkingOverrides, SamplingOverrides, SpeechRequest
from tts.speech.word_times import WordSpan, WordTimer
from tts.text.segmenter import SegmentStream, TextSegment
from tts.voices.types import Voice

AT_ONCE = 8  # requests
RATE = 0.3  # of the attempts get a fault
LATEST = 3  # words before the end, of which one is the first that a cut end leaves out
DRAWS = 6  # more faults of each sentence, that only the check gets
WHOLE = ChunkingOverrides(chunk_sizes=(500,), buffer=500)  # one block, which carries all codes
LONG_WORD = 4  # letters; shorter words are harder to find


class Fault(Enum):
    """Kind of fault."""

    MISSING = "a word cut out"
    DOUBLED = "a word doubled"
    EARLY = "end cut off"
    RUNAWAY = "no end"


@dataclass(frozen=True, slots=True)
class Planted:
    """Fault of an attempt, and the word at its place."""

    fault: Fault
    word: str = ""

    @property
    def is_short(self) -> bool:
        """Whether the fault is a short word that is cut out or doubled."""
        is_word = self.fault in {Fault.MISSING, Fault.DOUBLED}
        return is_word and len(letter_labels(self.word)) < LONG_WORD


Finding = tuple[Planted | None, bool]
"""Fault of an attempt, and whether the check found one."""

Ranges = list[tuple[int, int]]
"""Codes [start, end) that are played one after the other."""


def plant(
    fault: Fault, places: Sequence[tuple[int, int]], num_codes: int, longest: int, draw: Random
) -> tuple[int, Ranges]:
    """Return the number of the word at the fault's place, and the ranges of codes with the fault.

    `places`: codes [start, end) of each word; `longest`: number of codes at which a segment is cut.
    """
    number = draw.randrange(len(places))
    start, end = places[number]
    match fault:
        case Fault.MISSING:
            return number, [(0, start), (end, num_codes)]
        case Fault.DOUBLED:
            return number, [(0, end), (start, num_codes)]
        case Fault.EARLY:
            number = len(places) - draw.randint(1, min(LATEST, len(places)))
            return number, [(0, max(1, places[number][0]))]
        case Fault.RUNAWAY:
            rounds, rest = divmod(longest, num_codes)
            return number, [(0, num_codes)] * rounds + [(0, rest)]


@dataclass
class PlantedClient:
    """Engine client that plants faults; `segments`: of the requests, by their ids."""

    client: EngineClient
    aligner: Aligner
    codes_per_token: int
    rate: float
    segments: dict[str, TextSegment]
    draws: int  # more faults of each first attempt
    planted: dict[str, list[Planted | None]] = field(default_factory=dict)
    """Faults of the attempts of each request."""
    surveyed: dict[str, list[Finding]] = field(default_factory=dict)
    """More faults in the codes of each first attempt."""

    @property
    def codec(self) -> CodecSpec | None:
        return self.client.codec

    def generate(
        self, request: Request, hold: Hold | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        return self.client.generate(request, hold)

    async def encode_prompt(self, samples: np.ndarray) -> EncodedClip:
        return await self.client.encode_prompt(samples)

    async def status(self) -> EngineStatus:
        return await self.client.status()

    async def close(self, drain_s: float = 0.0) -> None:
        await self.client.close(drain_s)

    async def speak(self, job: SpeechJob) -> AsyncGenerator[AudioBlock, None]:
        """Stream a job, with a fault in a share of them; such a job is one block."""
        async with aclosing(self.client.speak(job)) as spoken:
            blocks = [block async for block in spoken]
        name = job.request.request_id.partition("#")[0]
        planted, blocks = await asyncio.to_thread(self._with_fault, job, blocks, name)
        self.planted.setdefault(name, []).append(planted)
        for block in blocks:
            yield block

    def _with_fault(
        self, job: SpeechJob, blocks: list[AudioBlock], name: str
    ) -> tuple[Planted | None, list[AudioBlock]]:
        draw = Random(job.request.sampling.seed)
        if blocks[-1].finish_reason is not FinishReason.STOP:
            return Planted(Fault.RUNAWAY), blocks  # the model's own
        codes = tuple(code for block in blocks for code in block.codes)
        longest = (job.request.sampling.max_tokens or 0) * self.codes_per_token
        spans, places = self._words(name, codes)
        if not spans:
            return None, blocks

        def drawn() -> tuple[Planted, Ranges]:
            fault = draw.choice(list(Fault))
            number, ranges = plant(fault, places, len(codes), longest, draw)
            return Planted(fault, spans[number].word.spoken), ranges

        is_faulty, (planted, ranges) = draw.random() < self.rate, drawn()
        if self.draws and name not in self.surveyed:
            more = [drawn() for _ in range(self.draws)]
            self.surveyed[name] = [self._finding(name, codes, *one) for one in more]
        return (planted, [cut(blocks, ranges, planted.fault)]) if is_faulty else (None, blocks)

    def _finding(
        self, name: str, codes: tuple[int, ...], planted: Planted, ranges: Ranges
    ) -> Finding:
        """Return a fault and whether the check finds it in the codes."""
        assert self.codec is not None
        kept = tuple(code for start, end in ranges for code in codes[start:end])
        verdict = check_segment(
            self.segments[name],
            len(kept) / self.codec.codes_per_second,
            is_cut=planted.fault is Fault.RUNAWAY,
            letters=self.aligner.letters(kept),
        )
        return planted, verdict.result is not CheckResult.SOUND

    def _words(
        self, name: str, codes: tuple[int, ...]
    ) -> tuple[list[WordSpan], list[tuple[int, int]]]:
        """Return the words, and the codes [start, end) of each."""
        assert self.codec is not None
        rate = self.codec.codes_per_second
        timer = WordTimer(self.aligner, self.segments[name].words, 1 / rate)
        spans = [*timer.push(codes), *timer.finish()]
        return spans, [(round(span.start_s * rate), round(span.end_s * rate)) for span in spans]


def cut(blocks: Sequence[AudioBlock], ranges: Ranges, fault: Fault) -> AudioBlock:
    """Return one block of ranges of the blocks' codes, and of their samples."""
    codes = tuple(code for block in blocks for code in block.codes)
    samples = np.concatenate([block.samples for block in blocks])
    per_code = len(samples) // len(codes)
    kept = tuple(code for start, end in ranges for code in codes[start:end])
    return blocks[-1]._replace(
        samples=np.concatenate([samples[a * per_code : b * per_code] for a, b in ranges]),
        first_sample=0,
        first_code=0,
        num_codes=len(kept),
        codes=kept,
        finish_reason=FinishReason.LENGTH if fault is Fault.RUNAWAY else FinishReason.STOP,
    )


@dataclass(frozen=True, slots=True)
class Case:
    """Sentence that is spoken by itself; `name` is the id of its requests."""

    name: str
    text: str
    segment: TextSegment
    voice: Voice
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Faults of the attempts at a sentence, and what the check found in each of them.

    `surveyed`: more faults in the codes of the first attempt. `clips`: the speech without faults,
    with faults, and with faults and the check; () without a recogniser.
    """

    case: Case
    planted: tuple[Planted | None, ...]
    results: tuple[CheckResult, ...]
    surveyed: tuple[Finding, ...] = ()
    clips: tuple[Clip, ...] = ()

    @property
    def attempts(self) -> Iterator[Finding]:
        """Iterate over the attempts at the sentence."""
        for planted, result in zip(self.planted, self.results, strict=True):
            yield planted, result is not CheckResult.SOUND

    @property
    def is_mended(self) -> bool:
        """Whether what is sent is certain to have no fault.

        The last attempt is sent if it is sound for the check; if none was, any of them.
        """
        is_sound = self.results[-1] is CheckResult.SOUND
        sent = self.planted[-1:] if is_sound else self.planted
        return not any(sent)


def cases(
    synthesizer: Synthesizer, texts: Iterable[str], voices: Iterable[str] = VOICES
) -> Iterator[Case]:
    """Iterate over the sentences of texts, each with one of the voices in turn and its own seed."""
    turns, number = cycle(voices), 0
    for text in texts:
        voice = synthesizer.voices.choose(next(turns))
        options = synthesizer.settings.traits.text_options(None, voice)
        for part in SegmentStream(options).split(text):
            source = text[part.start : part.end]
            alone = list(SegmentStream(options).split(source))
            if len(alone) == 1 and alone[0].words:
                yield Case(str(number), source, alone[0], voice, number)
                number += 1


Checks = list[tuple[CheckResult, ...]]
"""Results of all attempts of each segment."""


async def speak(synthesizer: Synthesizer, case: Case, *, check: bool) -> tuple[Clip, Checks]:
    """Return a sentence's speech, and the results of its check."""
    speech = await synthesizer.synthesize(
        SpeechRequest(
            case.text,
            voice=case.voice,
            encoding=AudioEncoding.PCM_F32LE,
            sampling=SamplingOverrides(seed=case.seed),
            request_id=case.name,
            check=check,
        )
    )
    samples = np.frombuffer(speech.audio, "<f4")
    return Clip(samples, speech.started.audio_format.sample_rate), list(speech.result.checks)


async def measure(
    service: Service,
    found: Sequence[Case],
    rate: float,
    *,
    draws: int = DRAWS,
    has_clips: bool = False,
) -> list[Outcome]:
    """Speak sentences with faults and the check; `has_clips`: and without the check and faults."""
    good, vocabulary = service.synthesizer, service.prompts.vocabulary
    assert good is not None
    assert vocabulary is not None
    if good.settings.aligner is None:
        raise SystemExit("the model has no aligner to place faults with")
    aligner = Aligner.load(good.settings.aligner)
    segments = {case.name: case.segment for case in found}
    clients = [
        PlantedClient(service.client, aligner, vocabulary.codes_per_token, rate, segments, more)
        for more in (draws, 0)
    ]
    checked, unchecked = (
        Synthesizer(client, service.prompts, good.voices, good.settings) for client in clients
    )
    gate = asyncio.Semaphore(AT_ONCE)

    async def outcome(case: Case) -> Outcome:
        async with gate:
            clip, (results,) = await speak(checked, case, check=True)
            clips: tuple[Clip, ...] = ()
            if has_clips:
                others = [await speak(one, case, check=False) for one in (good, unchecked)]
                clips = (*(other for other, _ in others), clip)
        faults, more = clients[0].planted[case.name], clients[0].surveyed.get(case.name, ())
        return Outcome(case, tuple(faults), results, tuple(more), clips)

    return list(await asyncio.gather(*map(outcome, found)))


def share(flags: Iterable[bool]) -> float:
    """Return the percentage of true values; 0 of none."""
    values = list(flags)
    return 100 * sum(values) / max(1, len(values))


def figures(found: Sequence[Outcome]) -> Iterator[Figure]:
    """Iterate over what the check found, what was sent, and its false alarms."""
    attempts = [attempt for one in found for attempt in one.attempts]
    judged = attempts + [finding for one in found for finding in one.surveyed]
    for kind in Fault:
        own = [(planted, is_found) for planted, is_found in judged
               if planted and planted.fault is kind]  # fmt: skip
        long = [is_found for planted, is_found in own if planted and not planted.is_short]
        note = f"of {len(own)}"
        if len(long) < len(own):
            note += f"; {share(long):.0f} % of {len(long)} with {LONG_WORD} letters or more"
        yield Figure(f"found: {kind.value}", (share(is_found for _, is_found in own),), "%",
                     note=note)  # fmt: skip
    faulty = [is_found for planted, is_found in judged if planted]
    alarms = [is_found for planted, is_found in attempts if not planted]
    yield Figure("found: all", (share(faulty),), "%", note=f"of {len(faulty)}")
    yield Figure("false alarms", (share(alarms),), "%", note=f"of {len(alarms)} good attempts")
    before = share(one.planted[0] is not None for one in found)
    after = share(not one.is_mended for one in found)
    yield Figure("sentences with a fault, unchecked", (before,), "%", note=f"of {len(found)}")
    yield Figure("sentences with a fault, checked", (after,), "%", bar=BAR_SHARE * before)


def heard(found: Iterable[Outcome], recogniser: Listener) -> Iterator[Figure]:
    """Iterate over the recogniser's rates per 1,000 words, in the order of `Outcome.clips`."""
    sums = [Slips()] * 3
    for one in found:
        meant, known = one.case.segment.text, dict[bytes, str]()
        for place, clip in enumerate(one.clips):
            key = clip.samples.tobytes()
            if key not in known:
                known[key] = recogniser.words(prepared(clip.samples, clip.sample_rate))
            sums[place] = total((sums[place], slips(meant, known[key])))
    bars = (None, None, BAR_SHARE * 1000 * sums[1].rate)
    names = ("heard without faults", "heard with faults", "heard with faults, checked")
    for name, slip, bar in zip(names, sums, bars, strict=True):
        note = f"{slip.missing} missing, {slip.extra} too many of {slip.words}"
        yield Figure(name, (1000 * slip.rate,), "per 1,000 words", bar=bar, note=note)


async def first_sound(synthesizer: Synthesizer, case: Case, *, check: bool) -> float:
    """Return the milliseconds to the first audio of a stream that runs alone."""
    request = SpeechRequest(
        case.text, voice=case.voice, sampling=SamplingOverrides(seed=case.seed), check=check
    )
    began, first_s = time.perf_counter(), 0.0
    async with aclosing(synthesizer.stream(request)) as events:
        async for event in events:
            if isinstance(event, AudioChunk):
                first_s = first_s or time.perf_counter() - began
    return 1000 * first_s


async def check_time(synthesizer: Synthesizer, aligner: Aligner, case: Case) -> float:
    """Return the milliseconds of a thread that the check takes for a second of speech."""
    speech = await synthesizer.synthesize(
        SpeechRequest(
            case.text,
            voice=case.voice,
            sampling=SamplingOverrides(seed=case.seed),
            chunking=WHOLE,
            check=False,
        )
    )
    codes = speech.chunks[-1].carry
    seconds = len(codes) / synthesizer.codec.codes_per_second
    began = time.thread_time()
    check_segment(case.segment, seconds, letters=aligner.letters(codes))
    return 1000 * (time.thread_time() - began) / seconds


async def costs(synthesizer: Synthesizer, found: Sequence[Case]) -> list[Figure]:
    """Stream sentences with and without the check in turn; the first one warms up."""
    assert synthesizer.settings.aligner is not None
    aligner = Aligner.load(synthesizer.settings.aligner)
    without, checked, times = [], [], []
    for number, case in enumerate(found):
        order = (False, True) if number % 2 else (True, False)
        first = {check: await first_sound(synthesizer, case, check=check) for check in order}
        taken = await check_time(synthesizer, aligner, case)
        if number:
            without.append(first[False])
            checked.append(first[True])
            times.append(taken)
    return [
        Figure("first sound, not checked", tuple(without), "ms"),
        Figure("first sound, checked", tuple(checked), "ms"),
        Figure("check of a second of speech", tuple(times), "ms", note="of a thread's time"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("Failures planted below the check of segments.", repeat=1)
    options.add_argument("--words", type=int, default=1000)
    options.add_argument("--seed", type=int, default=1, help="of the texts")
    options.add_argument("--rate", type=float, default=RATE, help="share of faulty attempts")
    options.add_argument("--moonshine", type=Path, help="the recogniser's folder")
    options.add_argument("--cost", action="store_true", help="measure what the check costs")
    args = options.parse_args(argv)
    recogniser = Recogniser(args.moonshine) if args.moonshine else None
    service = load_service({"model": {"model_path": args.model}} if args.model else {})
    assert service.synthesizer is not None
    texts = [text for _, text in hard_texts(args.words, args.seed)]
    with asyncio.Runner() as runner:
        asked = list(cases(service.synthesizer, texts))
        if args.cost:
            rows = runner.run(costs(service.synthesizer, asked))
        else:
            found = runner.run(measure(service, asked, args.rate, has_clips=bool(recogniser)))
            rows = list(figures(found))
            if recogniser is not None:
                rows += heard(found, recogniser)
        runner.run(service.close())
    return publish(Report("planted", tuple(rows)))


if __name__ == "__main__":
    sys.exit(main())
