"""Speech through LiveKit's NVIDIA plugin, as a program: python -m tests.clients.livekit_speech ADDRESS

The output is JSON; audio is 16-bit samples at 16 kHz in base64.
"""  # noqa: E501 - the command

from __future__ import annotations

import asyncio
import base64
import json
import sys
from typing import Any

from livekit.plugins import nvidia

PARTS = ["Hello there, my friend. This is", " the second sentence", " of this text. And the end."]


async def speak(address: str) -> dict[str, Any]:
    """Return the voices, the audio of a whole text, and that of text that arrives in parts."""
    tts = nvidia.TTS(server=address, use_ssl=False, voice="hazel")
    whole = await tts.synthesize("".join(PARTS)).collect()
    stream = tts.stream()
    for part in PARTS:
        stream.push_text(part)
    stream.end_input()
    streamed = b"".join([bytes(event.frame.data) async for event in stream])
    await stream.aclose()
    await tts.aclose()
    return {
        "voices": tts.list_voices(),
        "sample_rate": whole.sample_rate,
        "whole": base64.b64encode(bytes(whole.data)).decode(),
        "streamed": base64.b64encode(streamed).decode(),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(speak(sys.argv[1]))))
