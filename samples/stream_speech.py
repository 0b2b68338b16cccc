"""Synthesize one text over gRPC and write the audio as it arrives.

python -m samples.stream_speech "Good morning." morning.wav --server localhost:50051
"""

from __future__ import annotations

import argparse
import wave

import grpc

from tts.v1 import speech_pb2, speech_pb2_grpc


def main() -> None:
    parser = argparse.ArgumentParser(description="Speak one text over gRPC.")
    parser.add_argument("text")
    parser.add_argument("out", help="WAV file to write")
    parser.add_argument("--server", default="localhost:50051")
    parser.add_argument("--voice", default="", help="default: the server's")
    arguments = parser.parse_args()

    config = speech_pb2.SynthesisConfig(
        audio_format=speech_pb2.AudioFormat(encoding=speech_pb2.AUDIO_ENCODING_PCM_S16LE)
    )
    if arguments.voice:
        config.voice.name = arguments.voice
    request = speech_pb2.SynthesizeStreamRequest(
        config=config, input=speech_pb2.SynthesisInput(text=arguments.text)
    )
    with grpc.insecure_channel(arguments.server) as channel:
        events = speech_pb2_grpc.SpeechServiceStub(channel).SynthesizeStream(request)
        started = next(events).started  # always first: describes the audio that follows
        with wave.open(arguments.out, "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(started.audio_format.sample_rate_hertz)
            for event in events:
                kind = event.WhichOneof("event")
                if kind == "audio":
                    out.writeframes(event.audio.data)
                    print(f"{event.audio.sample_count} samples at {event.audio.sample_offset}")
                elif kind == "done":
                    print(f"{event.done.usage.audio_duration.ToTimedelta().total_seconds():.2f} s")


if __name__ == "__main__":
    main()
