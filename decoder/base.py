"""What an audio decoder is: its fixed facts (`CodecSpec`), one block of codes, one window, the ABC.

The package knows no language model: codes in, float32 samples out.

Codes of a stream are one flat row, also for codecs with several codebooks: frame after frame, and
inside a frame in the order of `CodecSpec.layout`, which names each place's codebook. A code is
always in 0..codebook_size - 1; what it means follows from its place, t mod codes_per_frame.

    one codebook           layout (0,)                    c0 c0 c0 …
    K codebooks, one rate  layout (0, 1, … K-1)           c0 c1 … cK-1 | c0 c1 …
    SNAC 24 kHz            layout (0, 1, 2, 2, 1, 2, 2)   one code of 12 Hz, two of 23, four of 47

Chunk sizes, buffer, look-ahead, carry and offsets all count codes and are whole frames.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


class DecoderError(Exception):
    """Base of everything this package raises on purpose."""


class DecoderConfigError(DecoderError, ValueError):
    """A decoder's files or options are wrong, or it cannot do what is asked (masks, encoding)."""


class CodeRangeError(DecoderError, ValueError):
    """Codes that cannot be this codec's: outside the codebook, or not whole frames."""


class EncoderUnavailableError(DecoderError):
    """Recordings cannot become codes here: there is no encoder, or a package is missing."""


class AudioFormatError(DecoderError, ValueError):
    """Audio bytes that cannot be read, or a format that cannot be written."""


class AttentionKind(Enum):
    """Which pairs of codes see each other before any mask is applied."""

    BIDIRECTIONAL = "bidirectional"
    CAUSAL = "causal"
    NONE = "none"  # convolutions only: no masks can be applied


class PrependPromptSpeechTokens(StrEnum):
    """When the voice prompt's codes go before a block's window."""

    NEVER = "never"
    ONCE = "once"
    ROLLING = "rolling"


@dataclass(frozen=True, slots=True)
class MaskPolicy:
    """The two unambiguous booleans behind the *_causal flags (True = may attend to the block)."""

    buffer_sees_current: bool = True
    prompt_sees_current: bool = True


@dataclass(frozen=True, slots=True)
class StreamingOptions:
    """How one stream is cut and what context each block gets.

    `chunk_sizes` None means one block at the end; otherwise the last size repeats. `look_ahead`
    is how many later codes a block waits for, to be rendered with them as right context; at the
    end of the stream it waits for none. `first_look_ahead` is that of the very first block: the
    fewer, the sooner there is sound, and the less true its last samples; None: as the others. It
    grows to `look_ahead` (see `grown_look_ahead`), so that no block waits for all of the rest.
    """

    chunk_sizes: tuple[int, ...] | None = None
    buffer: int = 0
    masks: MaskPolicy = field(default_factory=MaskPolicy)
    prepend: PrependPromptSpeechTokens = PrependPromptSpeechTokens.NEVER
    look_ahead: int = 0
    first_look_ahead: int | None = None

    def look_ahead_of(self, block_index: int) -> int:
        """How many later codes a block waits for."""
        first, sizes = self.first_look_ahead, self.chunk_sizes
        if first is None or sizes is None:
            return self.look_ahead
        spoken = sum(sizes[:block_index]) + max(0, block_index - len(sizes)) * sizes[-1]
        return grown_look_ahead(first, self.look_ahead, sizes[0], spoken)


def grown_look_ahead(first: int, most: int, block: int, spoken: int) -> int:
    """The look-ahead of a block that follows `spoken` codes, where the stream's first one, of
    `block` codes, had `first`: by one such block more for each three that were spoken.
    """
    return min(most, first + spoken // (3 * block) * block)


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """The fixed facts of one codec.

    `receptive_field` is how many codes before a frame can change its samples (None: unbounded),
    `right_field` how many after it. `layout` is each code's codebook inside a frame; see above.
    `recommended` is the streaming setup this codec was made for. With `keeps_state` a stream's
    whole past is heard, whatever its buffer.
    """

    name: str
    sample_rate: int  # Hz
    samples_per_code: Fraction  # sample_rate / codes per second
    codebook_size: int
    layout: tuple[int, ...] = (0,)
    receptive_field: int | None = None
    right_field: int | None = 0
    attention: AttentionKind = AttentionKind.BIDIRECTIONAL
    can_encode: bool = False
    keeps_state: bool = False
    recommended: StreamingOptions = field(default_factory=StreamingOptions)

    @property
    def codes_per_frame(self) -> int:
        return len(self.layout)

    @property
    def num_codebooks(self) -> int:
        return len(set(self.layout))

    @property
    def samples_per_frame(self) -> Fraction:
        return self.samples_per_code * self.codes_per_frame

    @property
    def codes_per_second(self) -> float:
        return float(self.sample_rate / self.samples_per_code)

    @property
    def can_mask(self) -> bool:
        return self.attention is not AttentionKind.NONE


class PcmFormat(StrEnum):
    """How a raw PCM sample is written where a request does not say."""

    S16LE = "s16le"
    F32LE = "f32le"


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """audio_decoder_config, checked: how one decoder is run. Which keys a codec takes differs.

    `max_batch` bounds how many windows share a call, `pcm_format` is the service's default for
    raw PCM, `token_rate_hz` None is the codec's own rate, `look_ahead`, `first_look_ahead` and
    `crossfade_ms` None what it recommends, `num_codebooks` None all that it has.
    """

    token_rate_hz: float | None = None
    max_batch: int = 8
    pcm_format: PcmFormat = PcmFormat.S16LE
    stateful: bool = False
    noise_seed: int | None = None
    crossfade_ms: float | None = None
    look_ahead: int | None = None
    first_look_ahead: int | None = None
    num_codebooks: int | None = None


@dataclass(frozen=True, slots=True)
class SpeechChunk:
    """One block of a stream's own codes: s[first_code : first_code + len(codes)).

    `future` are the codes after it that are there already, at most the look-ahead: right context
    that later blocks will emit.
    """

    codes: tuple[int, ...]
    first_code: int
    block_index: int
    future: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeWindow:
    """Everything a decoder needs for one block: prompt ++ history ++ current ++ future codes.

    `positions` are absolute. `block_ids` tell which block each own code is emitted in (prompt
    codes carry the smallest id and are told apart by `prompt_len`).
    Emitted are `num_samples` samples after the first `skip_samples` of the whole window.
    """

    codes: tuple[int, ...]
    positions: tuple[int, ...]
    block_ids: tuple[int, ...]
    prompt_len: int
    history_len: int
    masks: MaskPolicy
    skip_samples: int
    first_sample: int
    num_samples: int
    future_len: int = 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Prompt, history, block and look-ahead of equal length: nothing needs to be padded."""
        return len(self.codes), self.prompt_len, self.history_len, self.future_len


class TailSlot:
    """Where a tail of so many samples lies on a device; free again when nobody holds it."""

    __slots__ = ("_free", "index", "length")

    def __init__(self, free: list[int], length: int) -> None:
        self._free, self.index, self.length = free, free.pop(), length

    def __repr__(self) -> str:
        return f"TailSlot({self.index}, length={self.length})"

    def __del__(self) -> None:
        self._free.append(self.index)  # atomic: streams end on any thread


@dataclass(slots=True)
class StreamState:
    """What rendering one stream leaves for its next block; whoever owns the stream owns it.

    Only `render` changes it, and only when the whole call has succeeded. `kept` belongs to the
    codec; `tail` are the samples after the newest block as it was rendered, float32, to be blended
    with the next one's: on the host, or where a device has them.
    """

    kept: object = None
    tail: np.ndarray | TailSlot | None = None


class AudioDecoder(ABC):
    """Codes to samples, and back where the codec has an encoder. Stateless between calls."""

    spec: CodecSpec
    options: DecoderOptions = DecoderOptions()
    device: str = "cpu"  # where it renders; on a GPU the current one of whoever calls `decode`

    @abstractmethod
    def decode(self, windows: Sequence[DecodeWindow]) -> torch.Tensor:
        """Render windows of one `batch_key`; float32 [B, S] on the CPU or the decoder's device.

        Row b begins with the emitted samples of windows[b], `num_samples` of them. Those that a
        crossfade takes on follow, where the window has a look-ahead; then there may be anything.
        A row never depends on the other rows.
        """

    def batch_key(self, window: DecodeWindow) -> Hashable:
        """Windows of equal keys can be rendered in one call."""
        return window.shape

    def decode_next(self, window: DecodeWindow, kept: object) -> tuple[torch.Tensor, object]:
        """As `decode` of one window, going on from what the stream's former block left.

        `kept` None is the start of a stream. Returns the row [1, S] and what to keep. Only codecs
        with `options.stateful` keep anything.
        """
        return self.decode([window]), None

    def encode(self, samples: np.ndarray) -> tuple[int, ...]:
        """Mono float32 samples at the codec's rate to codes; raises where there is no encoder.

        From any thread; a GPU works at it beside its other streams.
        """
        raise DecoderConfigError(f"codec '{self.spec.name}' has no encoder in this release")
