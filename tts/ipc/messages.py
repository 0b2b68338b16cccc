"""Every value that crosses between a front end and the engine. Frozen; nothing else does.

    Hello ─▶                               ◀─ Welcome: facts about the model; or Refused
    Speak, Generate, Encode, Enter ─▶      ◀─ Taken, then Audio…, Tokens…, Codes or Entered
    Took: so many items were read ─▶       ◀─ Failed: the error instead
    Cancel ─▶                              ◀─ Beat: the engine lives, and how it is
    Goodbye ─▶                             ◀─ Farewell: it ends

A front end numbers its streams upwards and asks for them in that order. `front_end` is the name
under which one connection of one process is known; a new connection has a new one. The engine's
messages come as lists, in order.
"""

from __future__ import annotations

import msgspec
import numpy as np

from llm import Request, TokenChunk
from tts.engine_client import AudioBlock, EngineFacts, EngineStatus, SpeechJob


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A value on the wire: its fields in order, behind the name of its class."""


# --- from a front end


class Hello(Message, frozen=True):
    """I am here, a part of this server; repeated until the Welcome arrives."""

    front_end: str
    server_id: str


class Goodbye(Message, frozen=True):
    """I end: forget me and what I asked for."""

    front_end: str


class Took(Message, frozen=True):
    """Readers took items: of each stream, by its number, as many more may be sent."""

    front_end: str
    num_items: dict[int, int]


class Cancel(Message, frozen=True):
    """The reader of a stream has gone."""

    front_end: str
    stream: int


class Work(Message, frozen=True):
    """Something to do whose answers carry the stream's number."""

    front_end: str
    stream: int


class Speak(Work, frozen=True):
    """`EngineClient.speak`."""

    job: SpeechJob


class Generate(Work, frozen=True):
    """`EngineClient.generate`."""

    request: Request


class Encode(Work, frozen=True):
    """`EngineClient.encode_prompt`: mono float32 at the codec's rate."""

    samples: np.ndarray


class Enter(Work, frozen=True):
    """A place among the calls that run, for this client's call, until it is cancelled."""

    client: str


# --- from the engine


class Welcome(Message, frozen=True):
    """The answer to Hello: from now on this server's engine takes work."""

    server_id: str
    facts: EngineFacts
    status: EngineStatus


class Refused(Message, frozen=True):
    """The other answer to Hello: this is the engine of another server."""

    server_id: str


class Beat(Message, frozen=True):
    """Sent regularly: the engine's newest snapshot."""

    status: EngineStatus


class Farewell(Message, frozen=True):
    """The engine ends; nothing more will come."""


class Answer(Message, frozen=True):
    """Something about one stream."""

    stream: int


class Taken(Answer, frozen=True):
    """The work has left the queue."""


class Audio(Answer, frozen=True):
    """A block of a speech job."""

    block: AudioBlock


class Tokens(Answer, frozen=True):
    """A chunk of a text request."""

    chunk: TokenChunk


class Codes(Answer, frozen=True):
    """A reference clip's codes."""

    codes: tuple[int, ...]


class Entered(Answer, frozen=True):
    """The place is taken."""


class ErrorValue(msgspec.Struct, frozen=True, array_like=True):
    """An error by its class's name; `reason`, `subject`, `retry_after_s` where the class has them.

    Never a traceback: the engine's log has that.
    """

    kind: str
    message: str
    reason: str = ""
    subject: str = ""
    retry_after_s: float = 0.0


class Failed(Answer, frozen=True):
    """The stream ended with an error."""

    error: ErrorValue


FrontEndMessage = Hello | Goodbye | Took | Cancel | Speak | Generate | Encode | Enter
EngineMessage = (
    Welcome | Refused | Beat | Farewell | Taken | Audio | Tokens | Codes | Entered | Failed
)
