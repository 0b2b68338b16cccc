"""Time to first audio of a text that is spoken while it is generated, over loopback gRPC, warm.

    time to first audio = time of the first clause + usual time to first audio of that clause + rest

The first clause is there when the received text gives its first segment. Its usual time to first
audio is that of SynthesizeStream with the clause as text, while no text is generated.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from benchmarks.report import Figure, Report, arguments, publish
from tests.speech_server import SpeechClient, serving
from tts.text.clean import without_controls
from tts.text.segmenter import SegmentMode, SegmentStream, TextOptions
from tts.v1 import common_pb2, text_pb2
from tts.v1.text_pb2_grpc import TextServiceStub

BAR_MS = 20.0
WARM_UP = 2
MAX_TOKENS = 96
QUESTIONS = (
    "What does a good breakfast look like?",
    "Why is the sky blue, and the evening red?",
    "How do I keep a small garden alive in summer?",
    "Tell me about the history of the bicycle.",
)


@dataclass(frozen=True, slots=True)
class Spoken:
    """Times of one call, in seconds from just before it."""

    clause: str
    clause_s: float
    first_audio_s: float
    num_characters: int  # of the text, when the first audio arrived
    total_characters: int


def speak(stub: TextServiceStub, question: str, seed: int) -> Spoken:
    """Ask a question whose answer is spoken, and read it to the end."""
    message = text_pb2.ChatMessage(role=text_pb2.CHAT_ROLE_USER, content=question)
    sampling = common_pb2.SamplingParams(seed=seed, max_tokens=MAX_TOKENS)
    request = text_pb2.GenerateSpeechRequest(
        config=text_pb2.GenerationConfig(sampling=sampling),
        input=text_pb2.GenerationInput(chat=text_pb2.ChatMessages(messages=[message])),
    )
    segments = SegmentStream(TextOptions(mode=SegmentMode.CLAUSE))
    found: list[tuple[str, float]] = []
    characters: list[int] = [0]
    audio: list[tuple[float, int]] = []
    started = time.perf_counter()
    for event in stub.GenerateSpeech(request):
        text, now_s = event.text.delta.text, time.perf_counter() - started
        if text:
            characters[0] += len(text)
            found += [(segment.text, now_s) for segment in segments.feed(without_controls(text))]
        if event.text.HasField("done"):
            found += [(segment.text, now_s) for segment in segments.flush()]
        if event.speech.audio.data:
            audio.append((now_s, characters[0]))
    (clause, clause_s), (first_audio_s, num_characters) = found[0], audio[0]
    return Spoken(clause, clause_s, first_audio_s, num_characters, characters[0])


def measure(stub: TextServiceStub, client: SpeechClient, repeat: int) -> Report:
    """Ask questions one after the other, each followed by its first clause as plain speech."""
    pairs = []
    for number in range(WARM_UP + repeat):
        spoken = speak(stub, QUESTIONS[number % len(QUESTIONS)], number)
        usual_s = client.synthesize(spoken.clause, seed=number).first_audio_s
        pairs.append((spoken, usual_s))
    pairs = pairs[WARM_UP:]
    rest = tuple(1000 * (s.first_audio_s - s.clause_s - usual_s) for s, usual_s in pairs)
    return Report(
        "spoken text",
        (
            Figure("time of the first clause", tuple(1000 * s.clause_s for s, _ in pairs), "ms"),
            Figure("time to first audio", tuple(1000 * s.first_audio_s for s, _ in pairs), "ms"),
            Figure(
                "usual time to first audio", tuple(1000 * usual_s for _, usual_s in pairs), "ms"
            ),
            Figure("rest", rest, "ms", bar=BAR_MS),
            Figure(
                "share of the text at the first audio",
                tuple(100 * s.num_characters / s.total_characters for s, _ in pairs),
                "%",
            ),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Milliseconds to the first audio of a generated text.", repeat=20)
    parser.add_argument("--text-model", required=True, help="folder of the text model")
    args = parser.parse_args(argv)
    flags = ["--text-model", args.text_model]
    with (
        serving(args.model, flags) as server,
        SpeechClient(server.address) as client,
        grpc.insecure_channel(server.address) as channel,
    ):
        return publish(measure(TextServiceStub(channel), client, args.repeat))


if __name__ == "__main__":
    sys.exit(main())
