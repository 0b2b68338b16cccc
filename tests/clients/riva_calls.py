"""Calls with NVIDIA's client of Riva, as a program: its messages and ours would clash in a process.

    python -m tests.clients.riva_calls ADDRESS CLIP [CA TOKEN]

CLIP is a WAV file of `CLIP_TEXT`. The output is JSON; audio is in base64.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import grpc
import riva.client
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from riva.client.proto import riva_audio_pb2, riva_common_pb2, riva_tts_pb2

from tests.clients.riva_texts import CLIP_TEXT, PHRASES, TEXT

OPTIONS = {"seed": "7"}


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def contract() -> list[str]:
    """Return the client's own descriptors."""
    found = []
    for module in (riva_audio_pb2, riva_common_pb2, riva_tts_pb2):
        proto = FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(proto)
        found.append(text_of(proto.SerializeToString()))
    return found


def voices(service: riva.client.SpeechSynthesisService) -> dict[str, list[str]]:
    """Return the names of voices by language, put together as NVIDIA's talk.py does."""
    request = riva_tts_pb2.RivaSynthesisConfigRequest()
    return {
        config.parameters["language_code"]: [
            f"{config.parameters['voice_name']}.{subvoice.split(':')[0]}"
            for subvoice in config.parameters["subvoices"].split(",")
        ]
        for config in service.stub.GetRivaSynthesisConfig(request).model_config
    }


def failure(service: riva.client.SpeechSynthesisService, **values: Any) -> list[str]:
    """Return the code and the message that a call ends with."""
    try:
        service.synthesize(TEXT, **values)
    except grpc.RpcError as error:
        return [error.code().name, error.details()]
    return []


def speech(service: riva.client.SpeechSynthesisService, clip: Path) -> dict[str, Any]:
    """Return the audio of each kind of call."""
    encodings = riva.client.AudioEncoding
    settings: dict[str, Any] = {"voice_name": "hazel", "custom_configuration": OPTIONS}
    response = service.synthesize(TEXT, enable_word_time_offsets=True, **settings)
    streamed = list(service.synthesize_online(TEXT, enable_word_time_offsets=True, **settings))
    imitated = service.synthesize(
        TEXT,
        zero_shot_audio_prompt_file=clip,
        zero_shot_transcript=CLIP_TEXT,
        custom_configuration=OPTIONS,
    )
    return {
        "whole": text_of(response.audio),
        "future": text_of(service.synthesize(TEXT, future=True, **settings).result().audio),
        "streamed": [text_of(part.audio) for part in streamed if part.audio],
        "phrases": text_of(
            b"".join(part.audio for part in service.synthesize_online(PHRASES, **settings))
        ),
        "imitated": text_of(imitated.audio),
        "dictionary": service.synthesize(
            TEXT, custom_dictionary={"nine": "noon"}, **settings
        ).meta.processed_text,
        "meta": [response.meta.text, response.meta.processed_text],
        "words": [[w.word, w.start_time, w.end_time] for w in response.meta.words],
        "streamed_words": [
            [w.word, w.start_time, w.end_time] for part in streamed for w in part.meta.words
        ],
        "durations": list(response.meta.predicted_durations),
        "encodings": {
            name: text_of(
                service.synthesize(
                    TEXT, encoding=encodings.Value(name), sample_rate_hz=rate, **settings
                ).audio
            )
            for name, rate in (("FLAC", 22_050), ("OGGOPUS", 24_000), ("MULAW", 8_000))
        },
    }


def main(address: str, clip: str, ca: str | None = None, token: str = "") -> None:
    auth = riva.client.Auth(
        uri=address,
        ssl_root_cert=ca,
        use_ssl=ca is not None,
        metadata_args=[["authorization", f"Bearer {token}"]] if token else None,
    )
    service = riva.client.SpeechSynthesisService(auth)
    found = {
        "contract": contract(),
        "voices": voices(service),
        "speech": speech(service, Path(clip)),
        "failures": [
            failure(service, voice_name="Magpie-Multilingual.EN-US.Leo"),
            failure(service, custom_dictionary={"nine": "{@N}{@AY1}{@ZZ}"}),
            failure(service, encoding=riva.client.AudioEncoding.OGGOPUS, sample_rate_hz=44_100),
        ],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
