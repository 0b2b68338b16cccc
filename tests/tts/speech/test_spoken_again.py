"""Segments that fail the check are spoken again: which attempt is sent, and what is reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from llm import FinishReason
from tests.tts.ramp import SEEDED, TEXT, RampClient, build, collect_speech, run
from tts.engine.client import AudioBlock, SpeechJob
from tts.errors import SynthesisError
from tts.speech.check import CheckResult
from tts.speech.run import MAX_ATTEMPTS
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import SamplingOverrides, SpeechRequest

SENTENCE = "The ferry leaves at noon."
CUT, SOUND = CheckResult.CUT, CheckResult.SOUND


class FailingClient(RampClient):
    """Ends some of its jobs by their length, by their numbers."""

    def __init__(self, *cut: int) -> None:
        super().__init__()
        self.cut = cut

    async def speak(self, job: SpeechJob) -> AsyncGenerator[AudioBlock, None]:
        self.ends_with = FinishReason.LENGTH if len(self.jobs) in self.cut else None
        async for block in super().speak(job):
            yield block


def test_a_segment_that_fails_is_spoken_again_with_another_seed(tiny_checkpoint: Path) -> None:
    client = FailingClient(1, 2)
    heard = collect_speech(build(client, tiny_checkpoint), f"{SENTENCE} Bring a coat.", check=True)
    assert heard.result.checks == ((SOUND,), (CUT, CUT, SOUND))
    assert heard.result.num_retried_segments == 1
    assert heard.result.warnings == ()
    assert heard.result.finish_reason is FinishReason.STOP
    _, *again = client.jobs
    assert len({job.request.sampling.seed for job in again}) == 3
    assert len({job.request.request_id for job in again}) == 3
    assert len({(job.carry, job.token_offset, job.request.prompt_ids) for job in again}) == 1


def test_what_is_sent_is_the_sound_attempt_alone(tiny_checkpoint: Path) -> None:
    failing, sound = FailingClient(0), RampClient()
    heard = collect_speech(build(failing, tiny_checkpoint), SENTENCE, check=True)
    codes = failing.codes_of(failing.jobs[1].request)
    assert sum(chunk.token_count for chunk in heard.chunks) == len(codes)
    assert heard.chunks[-1].carry == tuple(codes[-3:])
    plain = collect_speech(build(sound, tiny_checkpoint), SENTENCE)
    assert heard.data != plain.data


def test_tokens_of_all_attempts_are_counted(tiny_checkpoint: Path) -> None:
    client = FailingClient(0, 1)
    usage = collect_speech(build(client, tiny_checkpoint), SENTENCE, check=True).result.usage
    assert usage.output_tokens == len(client.spoken)
    assert usage.prompt_tokens == sum(len(job.request.prompt_ids) for job in client.jobs)


def test_a_segment_that_always_fails_is_sent_with_a_warning(tiny_checkpoint: Path) -> None:
    client = FailingClient(*range(MAX_ATTEMPTS))
    heard = collect_speech(build(client, tiny_checkpoint), SENTENCE, check=True)
    assert heard.result.checks == ((CUT,) * MAX_ATTEMPTS,)
    assert "segment 0 differs from its text: cut" in heard.result.warnings
    assert heard.result.finish_reason is FinishReason.LENGTH
    first = client.codes_of(client.jobs[0].request)
    assert heard.chunks[-1].carry == tuple(first[-3:])


def test_streamed_equals_unary_with_retries(tiny_checkpoint: Path) -> None:
    streamed = collect_speech(build(FailingClient(0, 2, 3), tiny_checkpoint), check=True)
    request = SpeechRequest(TEXT, sampling=SEEDED, check=True)
    whole = run(build(FailingClient(0, 2, 3), tiny_checkpoint).synthesize(request))
    assert whole.audio == streamed.data
    assert whole.result.checks == streamed.result.checks


def test_without_a_check_each_segment_is_spoken_once(tiny_checkpoint: Path) -> None:
    client = FailingClient(0)
    heard = collect_speech(build(client, tiny_checkpoint), SENTENCE)
    assert (len(client.jobs), heard.result.checks) == (1, ())


def test_whole_speech_of_a_model_without_an_aligner_is_checked_on_request(
    tiny_checkpoint: Path,
) -> None:
    """Limits of length and end are those of the voices that have one."""
    for check, num_jobs in ((None, 1), (False, 1), (True, 2)):
        client = FailingClient(0)
        request = SpeechRequest(SENTENCE, sampling=SEEDED, check=check)
        run(build(client, tiny_checkpoint).synthesize(request))
        assert len(client.jobs) == num_jobs


def test_argmax_is_not_tried_again(tiny_checkpoint: Path) -> None:
    client = FailingClient(0)
    sampling = SamplingOverrides(seed=7, temperature=0.0)
    heard = collect_speech(build(client, tiny_checkpoint), SENTENCE, check=True, sampling=sampling)
    assert (len(client.jobs), heard.result.checks) == (1, ((CUT,),))


def test_speech_that_the_requests_limit_cuts_is_not_tried_again(tiny_checkpoint: Path) -> None:
    client = RampClient()
    sampling = SamplingOverrides(seed=7, max_tokens=12)
    heard = collect_speech(build(client, tiny_checkpoint), SENTENCE, check=True, sampling=sampling)
    assert (len(client.jobs), heard.result.finish_reason) == (1, FinishReason.LENGTH)


def test_an_engines_error_is_raised(tiny_checkpoint: Path) -> None:
    client = RampClient()
    client.ends_with = FinishReason.ERROR
    with pytest.raises(SynthesisError, match="the pages burnt"):
        collect_speech(build(client, tiny_checkpoint), SENTENCE, check=True)


def test_nothing_is_sent_before_the_check_and_leaving_cancels(tiny_checkpoint: Path) -> None:
    client = RampClient()
    client.gate.clear()
    synthesizer: Synthesizer = build(client, tiny_checkpoint)

    async def leave() -> None:
        events = synthesizer.stream(SpeechRequest(SENTENCE, sampling=SEEDED, check=True))
        await anext(events)
        audio = asyncio.ensure_future(anext(events))
        while not client.num_open:
            await asyncio.sleep(0)
        audio.cancel()
        await asyncio.gather(audio, return_exceptions=True)
        await events.aclose()
        assert client.num_open == 0

    run(leave())
