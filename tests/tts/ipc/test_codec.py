"""Encoding and decoding: messages round-trip, and other data is refused."""

from __future__ import annotations

from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder import (
    AudioEncoding,
    CodecSpec,
    CodeRangeError,
    DecoderError,
    StreamingOptions,
    to_s16,
)
from decoder.codecs.ramp import ramp_spec
from llm import (
    FinishReason,
    LLMError,
    QueueFullError,
    Request,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
)
from tts import errors
from tts.engine.client import AudioBlock, EngineInfo, SpeechJob
from tts.ipc import messages
from tts.ipc.codec import (
    bundle,
    decode_from_engine,
    decode_from_front_end,
    encode,
    from_error_value,
    to_error_value,
)
from tts.ipc.messages import (
    Accepted,
    Audio,
    Beat,
    Encode,
    Failed,
    Generate,
    Refused,
    Speak,
    Tokens,
    Welcome,
)
from tts.observe.engine_status import EngineStatus
from tts.server.status import status_of

ids = st.lists(st.integers(0, 2**31), min_size=1, max_size=40).map(tuple)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 1000),
    stop_token_ids=ids,
    allowed_ranges=st.just(((1, 5), (7, 9))),
    top_logprobs=st.none() | st.integers(0, 20),
)
requests = st.builds(Request, st.text(min_size=1), ids, sampling, st.integers(-9, 9), st.text())
jobs = st.builds(
    SpeechJob,
    requests,
    st.builds(StreamingOptions, st.none() | ids, st.integers(0, 99)),
    ids | st.just(()),
    st.none() | ids | st.just(()),
    st.integers(0, 10**6),
)
samples = st.lists(st.floats(-1, 1, width=32), max_size=50).map(
    lambda values: np.array(values, np.float32)
)


@given(requests, jobs)
def test_requests_round_trip(request: Request, job: SpeechJob) -> None:
    for message in (Generate("f", 1, request), Speak("f", 2, job)):
        assert decode_from_front_end(encode(message)) == message


@given(samples)
def test_samples_round_trip(values: np.ndarray) -> None:
    clip = decode_from_front_end(encode(Encode("f", 1, values)))
    assert isinstance(clip, Encode)
    np.testing.assert_array_equal(clip.samples, values)
    block = AudioBlock(values, 2, 3, 4, carry=(5,), finish_reason=FinishReason.STOP)
    (audio,) = decode_from_engine(bundle([encode(Audio(9, block))]))
    assert isinstance(audio, Audio)
    assert audio.block.samples.dtype == np.float32
    assert audio.block.samples.tobytes() == values.tobytes()
    assert audio.block.finish_reason is FinishReason.STOP


@given(samples)
def test_16_bit_samples_round_trip(values: np.ndarray) -> None:
    block = AudioBlock(to_s16(values), 0, 0, 1)
    (audio,) = decode_from_engine(bundle([encode(Audio(9, block))]))
    assert isinstance(audio, Audio)
    assert audio.block.samples.dtype == np.int16
    assert audio.block.samples.tobytes() == to_s16(values).tobytes()


def test_strided_samples_round_trip() -> None:
    values = np.arange(10, dtype=np.float32)[::2]
    clip = decode_from_front_end(encode(Encode("f", 1, values)))
    assert isinstance(clip, Encode)
    assert clip.samples.tolist() == values.tolist()


def test_replies_round_trip() -> None:
    codec = ramp_spec({"codebook_size": 7})
    odd = CodecSpec("odd", 24_000, Fraction(24_000, 49), 7)
    status = EngineStatus(1, 2, 3, 4, 5, 6, 7, is_alive=False)
    chunk = TokenChunk("r", (1,), (TokenLogprob(1, -0.5, ((1, -0.5),)),), queue_s=1.0)
    for answer in (
        Welcome("abc", EngineInfo(codec, 9, AudioEncoding.MULAW, "digest"), status),
        Welcome("abc", EngineInfo(odd, 9, AudioEncoding.PCM_F32LE), status),
        Welcome("abc", EngineInfo(None, 9, AudioEncoding.PCM_S16LE), status),
        Beat(status),
        Refused("abc"),
        Accepted(3),
        Tokens(3, chunk),
    ):
        assert decode_from_engine(bundle([encode(answer), encode(answer)])) == [answer, answer]


def test_messages_are_frozen() -> None:
    kinds = [*messages.FrontEndMessage.__args__, *messages.EngineMessage.__args__]
    assert len(kinds) > 12
    assert all(kind.__struct_config__.frozen for kind in kinds)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"nonsense",
        encode(Beat(EngineStatus(*[0] * 7))),
        msgspec.msgpack.encode(["Hello", "name", "id"]).replace(b"name", b"\xffame"),
        b"\x94" + msgspec.msgpack.encode(["Hello", "f", "id"])[1:] + b"\x91" * 100_000,
        msgspec.msgpack.encode(["Encode", "f", 0, [4, 2**62]]),  # samples by their number alone
        msgspec.msgpack.encode(["Encode", "f", 0, [4, b"odd"]]),
        msgspec.msgpack.encode(["Encode", "f", 0, [8, bytes(8)]]),
    ],
)
def test_data_that_is_not_a_message_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_from_front_end(data)


def test_a_wrong_type_is_refused() -> None:
    data = msgspec.msgpack.encode(["Credit", "f", {"one": 1}])
    with pytest.raises(msgspec.ValidationError):
        decode_from_front_end(data)


# --- errors


def tree(root: type[Exception]) -> list[type[Exception]]:
    return [root, *(found for child in root.__subclasses__() for found in tree(child))]


def round_trip(error: Exception) -> Exception:
    (failed,) = decode_from_engine(bundle([encode(Failed(1, to_error_value(error)))]))
    assert isinstance(failed, Failed)
    return from_error_value(failed.error)


@pytest.mark.parametrize("kind", [*tree(LLMError), *tree(DecoderError)])
def test_every_error_of_the_core_and_the_decoder_round_trips(kind: type[Exception]) -> None:
    again = round_trip(kind("say less"))
    assert type(again) is kind
    assert str(again) == "say less"


def test_errors_with_details_give_the_same_status() -> None:
    for error in (
        errors.PreconditionError(errors.Precondition.VOICE_CLONING, "it cannot"),
        errors.ServerBusyError("full", subject="server", retry_after_s=1.5),
        errors.StreamLimitError("too many", subject="client", retry_after_s=0.5),
        errors.SlowReaderError("slow"),
        errors.EngineLostError("gone"),
        QueueFullError("full"),
        CodeRangeError("70 of 64"),
    ):
        again = round_trip(error)
        assert type(again) is type(error)
        assert status_of(again, "id") == status_of(error, "id")


def test_an_unregistered_error_class_becomes_its_base_class() -> None:
    class FinerError(QueueFullError):
        pass

    assert type(round_trip(FinerError("full"))) is QueueFullError


def test_an_unknown_error_becomes_an_internal_error_without_its_text() -> None:
    again = round_trip(ZeroDivisionError("secret"))
    assert isinstance(again, errors.SynthesisError)
    assert "secret" not in status_of(again, "id").message


def test_text_requests_and_results_round_trip() -> None:
    """Schemas, echo, adapters and embeddings; absent and empty values stay distinct."""
    sampling = SamplingParams(json_schema='{"const": "é"}', echo=True, top_logprobs=0)
    for request in (
        Request("r", (1, 2), sampling, lora="pirate", cache_salt="tenant"),
        Request("r", (1,), embeds=True),
    ):
        assert decode_from_front_end(encode(Generate("f", 1, request))) == Generate("f", 1, request)
    scores = (TokenLogprob(5, None), TokenLogprob(6, -0.5, ((6, -0.5), (7, -1.0))))
    for chunk in (
        TokenChunk("r", prompt_logprobs=scores),
        TokenChunk("r", (), (), FinishReason.STOP, embeddings=(b"\x00\x00\x80?", b"")),
    ):
        assert decode_from_engine(bundle([encode(Tokens(3, chunk))])) == [Tokens(3, chunk)]
