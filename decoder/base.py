"""Interface of audio decoders: `CodecSpec`, a window of codes, and `AudioDecoder`.

The package is independent of language models: codes in, float32 samples out.

Codes of a stream are one flat row, also for codecs with several codebooks: frame after frame, and
inside a frame in the order of `CodecSpec.layout`, the codebook of each position. A code is
always in 0..codebook_size - 1; its codebook follows from its position, t mod codes_per_frame.

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
    """Base class of the errors that this package raises."""


class DecoderConfigError(DecoderError, ValueError):
    """A decoder's files or options are wrong, or it does not support a feature (masks,
    encoding).
    """


class CodeRangeError(DecoderError, ValueError):
    """Codes that are invalid for this codec: outside the codebook, or not whole frames."""


class EncoderUnavailableError(DecoderError):
    """Recordings cannot be encoded: there is no encoder, or a package is missing."""


class AudioFormatError(DecoderError, ValueError):
    """Audio bytes that cannot be read, or a format that cannot be written."""


class AttentionKind(Enum):
    """Pairs of codes that attend to each other before masks are applied."""

    BIDIRECTIONAL = "bidirectional"
    CAUSAL = "causal"
    NONE = "none"  # convolutions only: masks are not supported


class PrependPromptSpeechTokens(StrEnum):
    """The windows that the voice prompt's codes are prepended to."""

    NEVER = "never"
    ONCE = "once"
    ROLLING = "rolling"


@dataclass(frozen=True, slots=True)
class MaskPolicy:
    """Earlier codes that do not attend to the current block.

    `block_causal`: those of the buffer. `prepend_prompt_speech_tokens_causal`: those of the voice
    prompt.
    """

    block_causal: bool = False
    prepend_prompt_speech_tokens_causal: bool = False

    @property
    def is_masked(self) -> bool:
        """Whether any pair of codes is masked."""
        return self.block_causal or self.prepend_prompt_speech_tokens_causal


@dataclass(frozen=True, slots=True)
class StreamingOptions:
    """Division of one stream into blocks, and the context of each block.

    `chunk_sizes` None means one block at the end; otherwise the last size repeats. `look_ahead` is
    the number of later codes that a block waits for and uses as right context; at the end of the
    stream there are none. `first_look_ahead` is that of the first block: a smaller value gives
    earlier audio with less accurate last samples; None: like the others. It grows to `look_ahead`,
    by one block of the first size for each three of them that precede, so that no block waits for
    the whole difference. The first `silent_codes` of a stream are silence, whose sound no later
    code changes: a block looks ahead no further than it reaches beyond them.
    """

    chunk_sizes: tuple[int, ...] | None = None
    buffer: int = 0
    masks: MaskPolicy = field(default_factory=MaskPolicy)
    prepend: PrependPromptSpeechTokens = PrependPromptSpeechTokens.NEVER
    look_ahead: int = 0
    first_look_ahead: int | None = None
    silent_codes: int = 0

    def look_ahead_of(self, block_index: int) -> int:
        """Return the number of later codes that a block waits for."""
        sizes = self.chunk_sizes
        if sizes is None:
            return self.look_ahead
        start = sum(sizes[:block_index]) + max(0, block_index - len(sizes)) * sizes[-1]
        return self.look_ahead_at(start, sizes[min(block_index, len(sizes) - 1)])

    def look_ahead_at(self, start: int, size: int) -> int:
        """Return the number of later codes that the block [start, start + size) waits for."""
        ahead, first, sizes = self.look_ahead, self.first_look_ahead, self.chunk_sizes
        if first is not None and sizes is not None:
            ahead = min(ahead, first + start // (3 * sizes[0]) * sizes[0])
        if self.silent_codes:
            ahead = min(ahead, max(0, start + size - self.silent_codes))
        return ahead


@dataclass(frozen=True, slots=True)
class CodecSpec:
    """Constants of one codec.

    `receptive_field` is the number of codes before a frame that can change its samples (None:
    unbounded), `right_field` the number after it. `layout` is each code's codebook inside a frame;
    see above. `recommended` are the streaming options that this codec was made for. With
    `keeps_state` a block depends on the stream's whole past, regardless of its buffer. With
    `voice_codes` a voice prompt has exactly so many codes and is no speech: it stands, whole, in
    front of every window and takes no room in the buffer. `voice_levels` are the numbers of values
    of a voice code's dimensions, for voices that `blend_voices` can average. With `can_shift_pitch`
    windows may have another pitch than their codes, in the same voice and time.
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
    voice_codes: int = 0
    voice_levels: tuple[int, ...] = ()
    can_shift_pitch: bool = False
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
        size = self.samples_per_code  # as exact as a division of fractions, and ten times as fast
        return self.sample_rate * size.denominator / size.numerator

    @property
    def can_mask(self) -> bool:
        return self.attention is not AttentionKind.NONE


class PcmFormat(StrEnum):
    """Default format of raw PCM samples for requests without one."""

    S16LE = "s16le"
    F32LE = "f32le"


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """Checked audio_decoder_config of one decoder. Supported keys differ by codec.

    `max_batch` bounds the number of windows in a call, `pcm_format` is the service's default for
    raw PCM, `token_rate_hz` None is the codec's own rate; `look_ahead`, `first_look_ahead` and
    `crossfade_ms` None are the codec's recommendation, `num_codebooks` None all codebooks.
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
class DecodeWindow:
    """Input of a decoder for one block: prompt ++ history ++ current ++ future codes.

    `positions` are absolute. `block_ids` are the blocks in which own codes are emitted (prompt
    codes have the smallest id and are identified by `prompt_len`). The emitted samples are the
    `num_samples` after the first `skip_samples` of the whole window. `pitch` is added to that of
    the codes, in semitones.
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
    pitch: float = 0.0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Length of prompt, history, block and look-ahead: windows of equal shape need no
        padding.
        """
        return len(self.codes), self.prompt_len, self.history_len, self.future_len

    @property
    def block(self) -> tuple[int, ...]:
        """Codes of the current block, whose samples are emitted."""
        first = self.prompt_len + self.history_len
        return self.codes[first : len(self.codes) - self.future_len]

    def carry(self, buffer: int) -> tuple[int, ...]:
        """Return the last `buffer` codes up to the end of the block, without prompt codes."""
        end = len(self.codes) - self.future_len
        return self.codes[max(self.prompt_len, end - buffer) : end]


class TailSlot:
    """Slot of a tail of `length` samples on a device; free again when the object is deleted."""

    __slots__ = ("_free", "index", "length")

    def __init__(self, free: list[int], length: int) -> None:
        self._free, self.index, self.length = free, free.pop(), length

    def __repr__(self) -> str:
        return f"TailSlot({self.index}, length={self.length})"

    def __del__(self) -> None:
        self._free.append(self.index)  # atomic: streams end on any thread


@dataclass(slots=True)
class StreamState:
    """State that rendering one stream leaves for its next block, owned by the stream.

    Only `render` changes it, and only when the whole call has succeeded. `kept` belongs to the
    codec; `tail` are the float32 samples after the newest block, to be blended with the next
    block's: on the host, or in a slot of a device.
    """

    kept: object = None
    tail: np.ndarray | TailSlot | None = None


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One block that can be rendered now.

    `state` is that of its stream; without one the block is independent of its neighbours. `as_s16`
    requests 16-bit samples, which are returned if that needs no work on the host.
    """

    window: DecodeWindow
    state: StreamState = field(default_factory=StreamState)
    as_s16: bool = False


class AudioDecoder(ABC):
    """Converts codes to samples, and back if the codec has an encoder. Stateless between calls."""

    spec: CodecSpec
    options: DecoderOptions = DecoderOptions()
    # device of the network; on a GPU the current device of the thread that calls `decode`
    device: str = "cpu"

    @abstractmethod
    def decode(self, windows: Sequence[DecodeWindow]) -> torch.Tensor:
        """Render windows of one `batch_key`; float32 [B, S] on the CPU or the decoder's device.

        Row b begins with the emitted samples of windows[b], `num_samples` of them. The samples for
        a crossfade follow, if the window has a look-ahead; the rest is undefined. A row never
        depends on the other rows.
        """

    def batch_key(self, window: DecodeWindow) -> Hashable:
        """Return a key; windows of equal keys can be rendered in one call."""
        return window.shape

    def decode_next(
        self, windows: Sequence[DecodeWindow], kept: Sequence[object]
    ) -> tuple[torch.Tensor, list[object]]:
        """Render windows of different streams like `decode`, each continuing from the state of its
        stream's previous block.

        `kept` None is the start of a stream. Returns the rows [B, S] and the new states. Only
        codecs with `spec.keeps_state` keep a state.
        """
        return self.decode(windows), [None] * len(windows)

    def encode(self, samples: np.ndarray) -> tuple[int, ...]:
        """Encode mono float32 samples at the codec's rate; raises when there is no encoder.

        Thread-safe; a GPU runs it in parallel with its other streams.
        """
        raise DecoderConfigError(f"codec '{self.spec.name}' has no encoder in this release")


class SpeakerEncoder(ABC):
    """Converts recordings to vectors of their speakers."""

    vector_size: int
    sample_rate: int

    @abstractmethod
    def encode(self, samples: np.ndarray) -> bytes:
        """Return the vector, little-endian float32, of mono float32 [S] at `sample_rate`.

        Thread-safe. Raises AudioFormatError for a clip that is not finite, or too short.
        """
