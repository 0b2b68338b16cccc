"""`--phonemes`: what a text sounds like, in ARPAbet with stress, by the voice model's second task.

The model is asked sentence by sentence, each as it would be spoken: figures are words already.
"""

from __future__ import annotations

import re
from contextlib import aclosing

import grpc

from tts.say_client import SayError, SpeechClient
from tts.text import TextError, TextOptions, split_text

MAX_CHARACTERS = 160  # the longest text of which the model has seen all phones
MAX_TOKENS = 1024
CHARACTERS = re.compile(r"[a-z0-2 /]*")
PHONES = re.compile(r"[a-z]{1,3}[012]?(?: (?:/ )?[a-z]{1,3}[012]?)*")


async def print_phonemes(client: SpeechClient, text: str) -> None:
    """A line for each sentence. Raises SayError, also when the model has no such task."""
    try:
        segments = split_text(text, TextOptions(max_characters=MAX_CHARACTERS))
    except TextError as error:
        raise SayError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
    for segment in segments:
        print(await _phones(client, segment.text), flush=True)


async def _phones(client: SpeechClient, text: str) -> str:
    answer = ""
    try:
        async with aclosing(client.answer(text, MAX_TOKENS)) as pieces:
            async for piece in pieces:
                answer += piece
                if not CHARACTERS.fullmatch(piece):  # it need not go on to the end
                    raise _no_such_task()
    except SayError as error:
        raise (_no_such_task() if _is_no_task(error) else error) from error
    if not PHONES.fullmatch(answer.strip()):
        raise _no_such_task()
    return answer.strip()


def _is_no_task(error: SayError) -> bool:
    """No chat template, a model that writes no text at all, or one that does not come to an end."""
    return error.code in {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.OUT_OF_RANGE}


def _no_such_task() -> SayError:
    return SayError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "this model does not turn letters into phonemes; the built-in voice's does",
    )
