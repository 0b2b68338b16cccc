"""Fields of a request over a real connection: the effect of each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from llm import Request
from llm.batch import ScheduledBatch, StepOutput
from tests.fakes import StepLog, tiny_config
from tests.tts.ipc.remote_engine import engine_info_of
from tests.tts.server.test_text_service import pieces, whole
from tests.tts.serving import (
    Serving,
    collect_speech,
    hum,
    run_conversation,
    run_with_server,
    say,
    session_config,
    unary_request,
    wav,
)
from tts.engine.local_client import LocalEngineClient
from tts.factory import Service, connect_service
from tts.v1 import common_pb2
from tts.v1 import speech_pb2 as pb


def test_a_pronunciation_equals_the_respelled_text(service: Service) -> None:
    """The phrase is found at any position and in any letter case."""
    sequel = pb.Pronunciation(phrase="SQL", pronunciation="sequel")

    async def ask(served: Serving) -> None:
        plain = await collect_speech(served, "We speak SQL here.")
        respelled = await collect_speech(served, "We speak sequel here.")
        assert plain.data != respelled.data
        for text in ("We speak SQL here.", "We speak sql here."):
            assert (
                await collect_speech(served, text, pronunciations=[sequel])
            ).data == respelled.data
        other = pb.Pronunciation(phrase="HTML", pronunciation="sequel")
        assert (
            await collect_speech(served, "We speak SQL here.", pronunciations=[other])
        ).data == plain.data

    run_with_server(service, ask)


def test_the_answer_says_which_pronunciations_were_applied(service: Service) -> None:
    """A model that reads letters gets the nearest respelling."""
    ipa = pb.Pronunciation(
        phrase="tomato", pronunciation="/təˈmɑːtoʊ/", alphabet=pb.PRONUNCIATION_ALPHABET_IPA
    )
    arpabet = pb.Pronunciation(
        phrase="GIF", pronunciation="JH IH1 F", alphabet=pb.PRONUNCIATION_ALPHABET_ARPABET
    )
    other = pb.Pronunciation(phrase="absent", pronunciation="x")

    async def ask(served: Serving) -> None:
        values = {"pronunciations": [ipa, other, arpabet]}
        found = await collect_speech(served, "A gif of a tomato.", **values)
        assert found.data == (await collect_speech(served, "A jif of a tuhmahtoh.")).data
        expected = [
            pb.AppliedPronunciation(phrase="GIF", spoken="jif"),
            pb.AppliedPronunciation(phrase="tomato", spoken="tuhmahtoh"),
        ]
        assert list(found.done.pronunciations) == expected
        unary = await served.speech.Synthesize(unary_request("A gif of a tomato.", **values))
        assert list(unary.done.pronunciations) == expected

    run_with_server(service, ask)


def test_a_pronunciation_applies_in_a_conversation(service: Service) -> None:
    sequel = pb.Pronunciation(phrase="SQL", pronunciation="sequel")

    async def ask(served: Serving) -> None:
        async def heard(text: str, **values: object) -> bytes:
            responses = await run_conversation(served, session_config(**values), say(text))
            return b"".join(response.audio.data for response in responses)

        respelled = await heard("We speak sequel here.")
        assert await heard("We speak SQL here.", pronunciations=[sequel]) == respelled
        assert await heard("We speak SQL here.") != respelled

    run_with_server(service, ask)


def test_the_request_selects_the_normalization(service: Service) -> None:
    """Numbers are read as words or dropped."""

    async def ask(served: Serving) -> None:
        words = (await collect_speech(served, "I have five cats.")).data
        for mode in (pb.TEXT_NORMALIZATION_UNSPECIFIED, pb.TEXT_NORMALIZATION_ON):
            assert (
                await collect_speech(served, "I have 5 cats.", text_normalization=mode)
            ).data == words
        off = await collect_speech(
            served, "I have 5 cats.", text_normalization=pb.TEXT_NORMALIZATION_OFF
        )
        assert off.data != words

    run_with_server(service, ask)


def test_min_p_of_nearly_one_leaves_only_the_best_token(service: Service) -> None:
    """The rule holds for speech and for text."""
    only_best = {"min_p": 0.9999, "temperature": 1.0, "max_tokens": 24, "seed": 7}

    async def ask(served: Serving) -> None:
        def sampling(**values: float) -> common_pb2.SamplingParams:
            return common_pb2.SamplingParams(**{**only_best, **values})  # type: ignore[arg-type]

        async def heard(**values: float) -> bytes:
            return (await collect_speech(served, seed=None, sampling=sampling(**values))).data

        best = await heard(min_p=0, temperature=0)
        assert await heard() == best
        assert await heard(min_p=0) != best
        written = (await whole(served, **{**only_best, "min_p": 0, "temperature": 0})).token_ids
        assert (await whole(served, **only_best)).token_ids == written
        assert (await whole(served, **{**only_best, "min_p": 0})).token_ids != written

    run_with_server(service, ask)


def test_the_prompt_mask_of_the_request_is_used(service: Service) -> None:
    """The voice's codes in front of the speech are decoded with or without attention to it."""
    prompt = pb.VoicePrompt(audio=wav(hum(1.5)), transcript="hello there")

    async def ask(served: Serving) -> None:
        async def heard(**values: bool) -> bytes:
            once = pb.PREPEND_PROMPT_SPEECH_TOKENS_ONCE
            chunking = pb.ChunkingConfig(prepend_prompt_speech_tokens=once, **values)
            voice = pb.VoiceSelection(prompt=prompt)
            return (await collect_speech(served, chunking=chunking, voice=voice)).data

        default = await heard()  # true in the checkpoint
        assert await heard(prepend_prompt_speech_tokens_causal=True) == default
        assert await heard(prepend_prompt_speech_tokens_causal=False) != default

    run_with_server(service, ask)


class GatedLog(StepLog):
    """A step log that blocks steps while `gate` is clear."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        assert self.gate.wait(60)
        return super().execute(batch)


def test_text_of_a_higher_priority_is_written_first(
    own_client: Callable[..., LocalEngineClient], tiny_checkpoint: Path
) -> None:
    """Three requests wait for the only batch row; arrival order does not matter."""
    log = GatedLog()
    client = own_client(step_log=log, max_batch_size=1)
    service = connect_service(tiny_config(tiny_checkpoint), None, client, engine_info_of(client))

    async def ask(served: Serving) -> None:
        async def submit(name: str, priority: int) -> asyncio.Task[object]:
            before = (await client.status()).waiting
            asking = pieces(served, request_id=name, priority=priority, max_tokens=4)
            task = asyncio.ensure_future(asking)
            while (await client.status()).waiting == before:
                await asyncio.sleep(0.005)
            return task

        blocker = Request("blocker", tuple(b"in the way"))
        blocking = asyncio.ensure_future(anext(client.generate(blocker)))
        while not (await client.status()).running:
            await asyncio.sleep(0.005)
        tasks = [await submit(*call) for call in (("low", -900), ("plain", 0), ("high", 900))]
        log.gate.set()
        await asyncio.gather(*tasks)
        await blocking

    run_with_server(service, ask)
    names = [name.partition("#")[0] for (name,) in log.steps]
    assert list(dict.fromkeys(names)) == ["blocker", "high", "plain", "low"]
