"""Time to first audio over loopback gRPC, warm, with short sentences; with `--http` over HTTP, too.

Both protocols then take turns with the same requests, and the difference of each pair is reported.
With `--eager` the words of a sentence come one after another, as from a language model, and the
time counts from the fifth of them: the values of `eager` take turns with the same sentences.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing

from benchmarks.report import Figure, Report, arguments, publish
from tests.speech_server import Server, Speech, SpeechClient, serving

BAR_MS = 120.0
HTTP_BAR_MS = 3.0
WARM_UP = 3
EAGER, WORD_S, TIMED_WORD = (0, 1, 2), 0.1, 5
TEXTS = (  # 60 characters each
    "The train to the coast leaves from platform eleven at seven.",
    "Please leave that parcel with my neighbor if I am not there.",
    "We painted the kitchen yellow, and now it looks much bigger.",
    "She wrote the answers on the back of an old concert program.",
)


def measure(client: SpeechClient, repeat: int, texts: Sequence[str] = TEXTS) -> Report:
    """Send requests one after the other, with the texts in turn and a seed per request."""
    for number in range(WARM_UP):
        client.synthesize(texts[number % len(texts)], seed=number)
    speeches = [
        client.synthesize(texts[number % len(texts)], seed=100 + number) for number in range(repeat)
    ]
    first_ms = tuple(1000 * speech.first_audio_s for speech in speeches)
    return Report(
        "first audio",
        (
            Figure("time to first audio", first_ms, "ms", bar=BAR_MS, note="60 characters, warm"),
            Figure("audio of one request", tuple(s.seconds for s in speeches), "s"),
        ),
    )


def measure_eager(client: SpeechClient, repeat: int, word_s: float = WORD_S) -> Report:
    """Send sentences word by word, once with each value of `eager` in turn."""
    first_ms: dict[int, list[float]] = {eager: [] for eager in EAGER}
    for number in range(WARM_UP + repeat):
        words = TEXTS[number % len(TEXTS)].split()
        for eager in EAGER:
            speech = client.synthesize_words(
                words, pause_s=word_s, timed_word=TIMED_WORD, eager=eager, seed=number
            )
            first_ms[eager].append(1000 * speech.first_audio_s)
    return Report(
        "first audio of text that comes",
        tuple(
            Figure(
                f"fifth word to first audio, eager={eager}",
                tuple(first_ms[eager][WARM_UP:]),
                "ms",
                note=f"a word each {1000 * word_s:g} ms",
            )
            for eager in EAGER
        ),
    )


class HttpSpeechClient:
    """Client of POST /v1/audio/speech on one connection, one request at a time."""

    def __init__(self, address: str, sample_rate: int) -> None:
        self._connection = http.client.HTTPConnection(address)
        self._sample_rate = sample_rate

    def close(self) -> None:
        self._connection.close()

    def synthesize(self, text: str, *, seed: int = 0) -> Speech:
        """Synthesize a text as a stream; times count from just before the request."""
        body = {"input": text, "seed": seed, "sample_rate": self._sample_rate}
        started = time.perf_counter()
        data = json.dumps({**body, "response_format": "pcm"}).encode()
        self._connection.request("POST", "/v1/audio/speech", data)
        response = self._connection.getresponse()
        first = response.read1()
        first_audio_s = time.perf_counter() - started
        return Speech(first + response.read(), self._sample_rate, first_audio_s)


def compare(client: SpeechClient, other: HttpSpeechClient, repeat: int) -> Report:
    """Send each request over both protocols; the first of a pair alternates."""
    pairs = []
    for number in range(WARM_UP + repeat):
        text, seed = TEXTS[number % len(TEXTS)], number
        if number % 2:
            by_http = other.synthesize(text, seed=seed)
            by_grpc = client.synthesize(text, seed=seed)
        else:
            by_grpc = client.synthesize(text, seed=seed)
            by_http = other.synthesize(text, seed=seed)
        if by_grpc.pcm != by_http.pcm:
            raise RuntimeError("the protocols gave different samples")
        pairs.append((1000 * by_grpc.first_audio_s, 1000 * by_http.first_audio_s))
    grpc_ms, http_ms = zip(*pairs[WARM_UP:], strict=True)
    added = tuple(b - a for a, b in pairs[WARM_UP:])
    return Report(
        "first audio over HTTP",
        (
            Figure("time to first audio, gRPC", grpc_ms, "ms"),
            Figure("time to first audio, HTTP", http_ms, "ms"),
            Figure("added by HTTP", added, "ms", bar=HTTP_BAR_MS, note="pairs of equal requests"),
        ),
    )


def compare_protocols(server: Server, client: SpeechClient, repeat: int) -> Report:
    """Compare the protocols of a server that has both."""
    assert server.http is not None
    rate = client.synthesize(TEXTS[0]).sample_rate
    with closing(HttpSpeechClient(server.http, rate)) as other:
        return compare(client, other, repeat)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Milliseconds to the first audio over loopback gRPC.", repeat=20)
    parser.add_argument("--http", action="store_true", help="compare with HTTP")
    parser.add_argument("--eager", action="store_true", help="measure text that comes word by word")
    args = parser.parse_args(argv)
    flags = ["--http-port=0"] if args.http else []
    with serving(args.model, flags) as server, SpeechClient(server.address) as client:
        if args.http:
            return publish(compare_protocols(server, client, args.repeat))
        if args.eager:
            return publish(measure_eager(client, args.repeat))
        return publish(measure(client, args.repeat))


if __name__ == "__main__":
    sys.exit(main())
