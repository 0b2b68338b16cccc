"""Messages between front ends and the engine, all frozen.

    Hello ─▶                               ◀─ Welcome: properties of the model; or Refused
    Speak, Generate, Encode, Admit ─▶      ◀─ Accepted, then Audio…, Tokens…, Encoded or Admitted
    Prefill, Room, of another engine ─▶    ◀─ Accepted, then Pages…
    Credit: number of read items ─▶        ◀─ Failed: the error instead
    SetHeld: whether a text waits ─▶
    Cancel ─▶                              ◀─ Beat: heartbeat with the engine's status
    Goodbye ─▶                             ◀─ Farewell: the engine stops

A front end numbers its streams in increasing order and requests them in that order. `front_end` is
the name of one connection of one process; a new connection has a new name. The engine's messages
are sent as lists, in order.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from llm import PoolHandle, Request, Token, TokenChunk
from tts.engine.client import AudioBlock, EncodedClip, EngineInfo, SpeechJob
from tts.observe.engine_status import EngineStatus

NO_SLOT = -1


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base class of messages, encoded as an array of the class name and the fields."""


# --- from a front end


class Hello(Message, frozen=True):
    """Announcement of a front end of a server; repeated until the Welcome arrives."""

    front_end: str
    server_id: str


class Goodbye(Message, frozen=True):
    """Announcement that a front end stops; the engine cancels its streams."""

    front_end: str


class Credit(Message, frozen=True):
    """Numbers of items that readers have read, by stream; the engine may send as many more."""

    front_end: str
    num_items: dict[int, int]


class SetHeld(Message, frozen=True):
    """Whether the engine generates no tokens for a text stream until the next such message."""

    front_end: str
    stream: int
    is_held: bool


class Cancel(Message, frozen=True):
    """Cancellation of a stream by its reader."""

    front_end: str
    stream: int


class Work(Message, frozen=True):
    """Base class of requests; their answers carry the stream's number."""

    front_end: str
    stream: int


class Speak(Work, frozen=True):
    """Request of `EngineClient.speak`, behind the slot that this stream of the connection holds or
    waits for; NO_SLOT: at once.
    """

    job: SpeechJob
    slot: int = NO_SLOT


class Generate(Work, frozen=True):
    """Request of `EngineClient.generate`."""

    request: Request


class Encode(Work, frozen=True):
    """Request of `EngineClient.encode_prompt`: float32 [S], mono at the codec's rate."""

    samples: np.ndarray


class Admit(Work, frozen=True):
    """Request for a slot among the running calls, for a client's call, until it is cancelled."""

    client: str


class Prefill(Work, frozen=True):
    """Request to compute a prompt for another engine; nothing moves before its Room has arrived."""

    request: Request


class Room(Message, frozen=True):
    """Room for the pages of a prompt, whose reader has those before `first_page`.

    `inbox` is the path of the reader's shared memory, see `tts.ipc.inbox`; empty: it has none.
    `pool` is its pool, which an engine of the same machine may write to, see `llm.PeerPool`: to
    `pages`, one for each page that is missing, for as long as it holds the inbox. With
    `wants_digest` the answer has a `PageTransfer.digest`.
    """

    front_end: str
    stream: int
    first_page: Annotated[int, msgspec.Meta(ge=0)]
    inbox: str = ""
    pool: PoolHandle | None = None
    pages: tuple[int, ...] = ()
    wants_digest: bool = False


# --- from the engine


class Welcome(Message, frozen=True):
    """Positive answer to Hello: the engine accepts requests from now on."""

    server_id: str
    info: EngineInfo
    status: EngineStatus


class Refused(Message, frozen=True):
    """Negative answer to Hello: the engine belongs to another server."""

    server_id: str


class Beat(Message, frozen=True):
    """Heartbeat with the engine's newest status."""

    status: EngineStatus


class Farewell(Message, frozen=True):
    """Last message of the engine before it stops.

    `unloads`: it was idle, accepts no more work, and is started again when work is wanted. Front
    ends answer with Goodbye.
    """

    unloads: bool = False


class Answer(Message, frozen=True):
    """Base class of messages about one stream."""

    stream: int


class Accepted(Answer, frozen=True):
    """Confirmation that a request has left the queue."""


class Audio(Answer, frozen=True):
    """Block of a speech job."""

    block: AudioBlock


class Tokens(Answer, frozen=True):
    """Chunk of a text request."""

    chunk: TokenChunk


class Encoded(Answer, frozen=True):
    """A reference clip."""

    clip: EncodedClip


class Pages(Answer, frozen=True):
    """Content of the next pages of a prompt, in order, as read by `llm.PageTransfer`.

    It is in `data`, or in the first `num_bytes` of a slot of the reader's inbox that is not
    negative, or in the pages of its pool already (`is_written`), with a digest the first time, and
    if one is wanted. With the last one comes the first token of the answer, if it was sampled.
    """

    num_pages: int
    num_bytes: int
    data: memoryview
    slot: int = -1
    is_written: bool = False
    is_last: bool = False
    token: Token | None = None
    digest: int | None = None


class Admitted(Answer, frozen=True):
    """Confirmation that a slot is held."""


class ErrorValue(msgspec.Struct, frozen=True, array_like=True):
    """Error by its class's name, with `reason`, `subject` and `retry_after_s` of classes that have
    them. Tracebacks are in the engine's log only.
    """

    kind: str
    message: str
    reason: str = ""
    subject: str = ""
    retry_after_s: float = 0.0


class Failed(Answer, frozen=True):
    """End of a stream with an error."""

    error: ErrorValue


FrontEndMessage = (
    Hello | Goodbye | Credit | SetHeld | Cancel | Speak | Generate | Encode | Admit | Prefill | Room
)
EngineMessage = (
    Welcome
    | Refused
    | Beat
    | Farewell
    | Accepted
    | Audio
    | Tokens
    | Encoded
    | Pages
    | Admitted
    | Failed
)
