"""Send text as it is typed and write the speech; every line is synthesized when it is complete.

    python -m samples.type_speech talk.wav --server localhost:50051

Type, press Enter to hear (here: to write) the line, and end with Ctrl-D.
"""

from __future__ import annotations

import argparse
import sys
import wave
from collections.abc import Iterator

import grpc

from tts.v1 import speech_pb2, speech_pb2_grpc


def requests(voice: str) -> Iterator[speech_pb2.StreamingSynthesizeRequest]:
    """Send the configuration once, then lines; gRPC reads the next one when it can be sent."""
    synthesis = speech_pb2.SynthesisConfig()
    if voice:
        synthesis.voice.name = voice
    config = speech_pb2.StreamingSynthesizeConfig(synthesis=synthesis)
    yield speech_pb2.StreamingSynthesizeRequest(config=config)
    for number, line in enumerate(sys.stdin, start=1):
        yield speech_pb2.StreamingSynthesizeRequest(text=line)
        # A line may end without a full stop: a flush synthesizes it at once.
        flush = speech_pb2.Flush(flush_id=str(number))
        yield speech_pb2.StreamingSynthesizeRequest(flush=flush)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speak lines over gRPC as they are typed.")
    parser.add_argument("out", help="WAV file to write")
    parser.add_argument("--server", default="localhost:50051")
    parser.add_argument("--voice", default="", help="default: the server's")
    arguments = parser.parse_args()

    with grpc.insecure_channel(arguments.server) as channel:
        stub = speech_pb2_grpc.SpeechServiceStub(channel)
        events = stub.StreamingSynthesize(requests(arguments.voice))
        started = next(events).started  # always first: describes the audio that follows
        with wave.open(arguments.out, "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(started.audio_format.sample_rate_hertz)
            for event in events:
                kind = event.WhichOneof("event")
                if kind == "audio":
                    out.writeframes(event.audio.data)
                elif kind == "flush_done":
                    seconds = event.flush_done.sample_offset / out.getframerate()
                    print(f"line {event.flush_done.flush_id} ends at {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main()
