"""One stream's audio blocks: windows, attention masks, the sample grid and the crossfade.

A stream is cut into blocks of its own codes. A block is complete as soon as its last code has
arrived, and with a look-ahead that many later codes; it is not held back to find out whether more
codes follow. The blocks depend on the codes only, not on how many arrive at once. A block is
rendered as one *window*

    [ prompt part | history | current block | future ]
                             ^ skip_samples: only num_samples right of here are emitted

where history is the last `buffer` codes before the block, the prompt part follows the prepend mode
(for a codec with `voice_codes`: all of it, in every window) and future is the look-ahead: codes
that have arrived and that later blocks emit. A codec with right context needs them; the last block
of a stream has none. Positions are absolute (own code t sits at token_offset + t), so a decoder
with rotary positions or position-keyed noise renders a code alike in every window. Samples are cut
on the grid floor(position * samples_per_code): nothing is lost or doubled at rational rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from decoder.base import (
    AttentionKind,
    AudioDecoder,
    CodecSpec,
    CodeRangeError,
    DecoderConfigError,
    DecoderError,
    DecoderOptions,
    DecodeWindow,
    PrependPromptSpeechTokens,
    StreamingOptions,
)

if TYPE_CHECKING:
    import numpy as np

_NEVER = PrependPromptSpeechTokens.NEVER
CARRY_BLOCK = -1
PROMPT_BLOCK = -2


def sample_index(position: int, samples_per_code: Fraction) -> int:
    """Return the first sample of the code at an absolute position (which may be negative)."""
    return position * samples_per_code.numerator // samples_per_code.denominator


def check_codes(codes: Iterable[int], codebook_size: int, what: str) -> tuple[int, ...]:
    """Return the codes as a tuple; raises CodeRangeError naming the first that is out of range."""
    checked = tuple(codes)
    if checked and not (min(checked) >= 0 and max(checked) < codebook_size):
        bad = next(code for code in checked if not 0 <= code < codebook_size)
        raise CodeRangeError(f"{what} code {bad} is outside 0..{codebook_size - 1}")
    return checked


def check_frames(
    count: int, spec: CodecSpec, what: str, error: type[DecoderError] = DecoderConfigError
) -> None:
    """Raise an error when a number of codes is not whole frames."""
    if count % spec.codes_per_frame:
        raise error(
            f"{what} is {count} but codec '{spec.name}' has {spec.codes_per_frame} codes per "
            "frame: give a multiple"
        )


def check_windows(decoder: AudioDecoder, windows: Sequence[DecodeWindow]) -> None:
    """Raise CodeRangeError or DecoderConfigError for windows that cannot be rendered in one
    call.
    """
    spec = decoder.spec
    for window in windows:
        check_codes(window.codes, spec.codebook_size, "speech")
        check_frames(len(window.codes), spec, "number of codes in a window")
    if len({decoder.batch_key(window) for window in windows}) != 1:
        raise DecoderConfigError("windows of one decode call must have one batch key")


class DecoderStream:
    """Cuts the codes of one stream into blocks; returns each as a window with its context.

        stream = DecoderStream(spec, options)
        windows = stream.push(codes)     # those that the codes complete
        windows = stream.finish()        # those of the remaining codes

    The block sizes are `chunk_sizes`, the last of which repeats; None: one block with all codes at
    the end. Codes of an incomplete last frame are dropped. Holds codes only; rendering is a pure
    function. `carry` None starts a new stream; a tuple, even an empty one, continues an earlier
    one: it has that stream's last codes, and `token_offset` is the number of its codes. `pitch` is
    in semitones, see `DecodeWindow`.
    """

    def __init__(
        self,
        spec: CodecSpec,
        options: StreamingOptions,
        *,
        prompt_codes: Sequence[int] = (),
        carry: Sequence[int] | None = None,
        token_offset: int = 0,
        pitch: float = 0.0,
    ) -> None:
        _check_numbers(options, spec)
        if pitch and not spec.can_shift_pitch:
            raise DecoderConfigError(f"codec '{spec.name}' cannot change the pitch of its codes")
        if token_offset < 0:
            raise DecoderConfigError(f"token_offset {token_offset} is negative")
        for what, count in (
            ("token_offset", token_offset),
            ("number of carried codes", len(carry or ())),
            ("number of voice prompt codes", len(prompt_codes)),
        ):
            check_frames(count, spec, what, CodeRangeError)
        if spec.voice_codes not in (0, len(prompt_codes)):
            raise CodeRangeError(
                f"codec '{spec.name}' needs a voice prompt of {spec.voice_codes} codes, not "
                f"{len(prompt_codes)}"
            )
        carried = check_codes(carry or (), spec.codebook_size, "carried")
        self._spec = spec
        if carry:  # of the speech that this stream continues
            options = replace(options, first_look_ahead=None, silent_codes=0)
        self._options = options
        self._prompt = check_codes(prompt_codes, spec.codebook_size, "voice prompt")
        self._token_offset, self._pitch = token_offset, pitch
        self._origin = sample_index(token_offset, spec.samples_per_code)
        self._is_fresh = carry is None
        self.carry = _last(carried, options.buffer)
        """The last `buffer` codes after the newest window: what a follow-up request sends."""
        self._history_blocks = (CARRY_BLOCK,) * len(self.carry)
        self._num_codes = 0
        self._num_blocks = 0
        self._waiting: list[int] = []  # codes of no block yet
        self._is_finished = False
        self._plan_next()
        self.num_missing = self._num_needed
        """Number of codes until the next block is complete; infinity: not before `finish`."""

    def __repr__(self) -> str:
        return (
            f"DecoderStream(blocks={self._num_blocks}, codes={self._num_codes}, "
            f"waiting={len(self._waiting)}, history={len(self.carry)}, "
            f"prompt={len(self._prompt)}, finished={self._is_finished})"
        )

    @property
    def num_codes(self) -> int:
        """Number of own codes in windows so far."""
        return self._num_codes

    @property
    def next_token_offset(self) -> int:
        """The `token_offset` of a stream that continues after the newest window."""
        return self._token_offset + self._num_codes

    def push(self, codes: Iterable[int]) -> list[DecodeWindow]:
        """Add new codes; return the windows of the blocks that they complete, in order.

        Raises CodeRangeError for codes outside the codebook, which are not added, and ValueError
        after `finish`.
        """
        if self._is_finished:
            raise ValueError("codes after the end of the stream")
        self._waiting += check_codes(codes, self._spec.codebook_size, "speech")
        windows: list[DecodeWindow] = []
        while len(self._waiting) >= self._num_needed:
            windows.append(self._cut(self._size))
        self.num_missing = self._num_needed - len(self._waiting)
        return windows

    def finish(self) -> list[DecodeWindow]:
        """End the stream; return the windows of the remaining codes. Later calls return none."""
        self._is_finished = True
        num_waiting = len(self._waiting)
        del self._waiting[num_waiting - num_waiting % self._spec.codes_per_frame :]
        windows: list[DecodeWindow] = []
        while self._waiting:
            size = self._size or len(self._waiting)
            windows.append(self._cut(min(size, len(self._waiting))))
        return windows

    def _plan_next(self) -> None:
        """Set the size and the look-ahead of the next block; a single block has no size."""
        sizes = self._options.chunk_sizes
        if sizes is None:
            self._size, self._look_ahead, self._num_needed = 0, self._options.look_ahead, math.inf
            return
        self._size = sizes[min(self._num_blocks, len(sizes) - 1)]
        self._look_ahead = self._options.look_ahead_at(self._num_codes, self._size)
        self._num_needed = self._size + self._look_ahead

    def _cut(self, size: int) -> DecodeWindow:
        """Return the window of the next block, which has `size` codes."""
        codes = tuple(self._waiting[:size])
        future = tuple(self._waiting[size : size + self._look_ahead])
        window = self._build(codes, future)
        del self._waiting[:size]
        buffer, blocks = self._options.buffer, (self._num_blocks,) * size
        self.carry = _last(self.carry + codes, buffer)
        self._history_blocks = _last(self._history_blocks + blocks, buffer)
        self._num_codes += size
        self._num_blocks += 1
        self._plan_next()
        return window

    def _build(self, codes: tuple[int, ...], future: tuple[int, ...]) -> DecodeWindow:
        prompt = self._prompt_part()
        context_len = len(prompt) + len(self.carry)
        first = self._token_offset + self._num_codes
        start, end = first - context_len, first + len(codes)
        ratio = self._spec.samples_per_code
        emit_from = sample_index(first, ratio)
        return DecodeWindow(
            codes=prompt + self.carry + codes + future,
            positions=tuple(range(start, end + len(future))),
            block_ids=(
                (PROMPT_BLOCK,) * len(prompt)
                + self._history_blocks
                + (self._num_blocks,) * len(codes)
                + self._future_blocks(len(future))
            ),
            prompt_len=len(prompt),
            history_len=len(self.carry),
            masks=self._options.masks,
            skip_samples=emit_from - sample_index(start, ratio),
            first_sample=emit_from - self._origin,
            num_samples=sample_index(end, ratio) - emit_from,
            future_len=len(future),
            pitch=self._pitch,
        )

    def _future_blocks(self, count: int) -> tuple[int, ...]:
        """Return the ids of the blocks that will emit the next `count` codes, by the chunk
        sizes.
        """
        if not count:
            return ()
        sizes = self._options.chunk_sizes or (count,)
        blocks: list[int] = []
        block = self._num_blocks
        while len(blocks) < count:
            block += 1
            blocks += [block] * sizes[min(block, len(sizes) - 1)]
        return tuple(blocks[:count])

    def _prompt_part(self) -> tuple[int, ...]:
        mode = self._options.prepend
        if mode is PrependPromptSpeechTokens.NEVER:
            return ()
        if self._spec.voice_codes or (self._is_fresh and self._num_blocks == 0):
            return self._prompt
        if mode is PrependPromptSpeechTokens.ONCE:
            return ()
        return _last(self._prompt, self._options.buffer - len(self.carry))


def attention_mask(window: DecodeWindow, kind: AttentionKind) -> np.ndarray:
    """Return which code (row) may attend to which (column): bool [T, T], True = may attend.

    Starts from the decoder's own relation and only removes pairs, by `window.masks`: prompt codes
    lose the stream's own codes, own codes lose blocks later than theirs, with the look-ahead as one
    block.
    """
    import numpy as np

    if kind is AttentionKind.NONE:
        raise DecoderConfigError("a decoder without attention cannot apply masks")
    num_codes = len(window.codes)
    mask = np.ones((num_codes, num_codes), dtype=bool)
    if kind is AttentionKind.CAUSAL:
        return np.tril(mask)
    prompt = window.prompt_len
    if window.masks.prepend_prompt_speech_tokens_causal:
        mask[:prompt, prompt:] = False
    if window.masks.block_causal:
        own = np.asarray(window.block_ids[prompt:])
        mask[prompt:, prompt:] = own[:, None] >= own[None, :]
    return mask


def validate_streaming(options: StreamingOptions, spec: CodecSpec) -> list[str]:
    """Check streaming options against a codec: raises errors, returns warnings."""
    _check_numbers(options, spec)
    masks = options.masks
    if masks.is_masked and not spec.can_mask:
        raise DecoderConfigError(
            f"codec '{spec.name}' cannot apply attention masks: block_causal and "
            "prepend_prompt_speech_tokens_causal must be false"
        )
    if spec.voice_codes and options.prepend is not PrependPromptSpeechTokens.ROLLING:
        raise DecoderConfigError(
            f"codec '{spec.name}' needs the voice in front of every block: "
            "prepend_prompt_speech_tokens must be 'rolling'"
        )
    is_deaf = spec.attention is AttentionKind.NONE and not spec.voice_codes
    if is_deaf and options.prepend is not _NEVER:
        raise DecoderConfigError(
            f"codec '{spec.name}' has no attention and ignores voice prompts:  "
            "prepend_prompt_speech_tokens must be 'never'"
        )
    return [
        *_prompt_warnings(options, spec),
        *_buffer_warnings(options, spec),
        *_look_ahead_warnings(options, spec),
    ]


def _check_numbers(options: StreamingOptions, spec: CodecSpec) -> None:
    """Raise DecoderConfigError unless blocks and their context are whole frames."""
    sizes = options.chunk_sizes
    if sizes is not None:
        if not sizes:
            raise DecoderConfigError("chunk_size is empty: give sizes, or none for one block")
        for size in sizes:
            if type(size) is not int or size <= 0:
                raise DecoderConfigError(f"chunk_size {size!r} is not a positive integer")
            check_frames(size, spec, "chunk_size")
    for name in ("buffer", "look_ahead"):
        value = getattr(options, name)
        if type(value) is not int or value < 0:
            raise DecoderConfigError(f"{name} {value!r} is not an integer >= 0")
        check_frames(value, spec, name)
    first = options.first_look_ahead
    if first is None:
        return
    if type(first) is not int or not 0 <= first <= options.look_ahead:
        raise DecoderConfigError(
            f"first_look_ahead {first!r} is not an integer from 0 to the look_ahead, "
            f"{options.look_ahead}"
        )
    check_frames(first, spec, "first_look_ahead")


def _prompt_warnings(options: StreamingOptions, spec: CodecSpec) -> list[str]:
    mode, masks, sizes = options.prepend, options.masks, options.chunk_sizes
    warnings = []
    is_rolling = mode is PrependPromptSpeechTokens.ROLLING and not spec.voice_codes
    if is_rolling and options.buffer == 0:
        warnings.append("rolling prompt codes with buffer 0 act like 'once'")
    if mode is PrependPromptSpeechTokens.ONCE and sizes and _is_below(sizes[0], spec):
        warnings.append(
            f"first chunk of {sizes[0]} codes is below the receptive field "
            f"({_field_text(spec)}): with 'once' the second block loses prompt context"
        )
    has_leak = masks.block_causal and not masks.prepend_prompt_speech_tokens_causal
    if has_leak and mode is not PrependPromptSpeechTokens.NEVER and _has_relation(spec):
        warnings.append(
            "block_causal without prepend_prompt_speech_tokens_causal leaks the current block "
            "into the history through the prompt"
        )
    return warnings


def _buffer_warnings(options: StreamingOptions, spec: CodecSpec) -> list[str]:
    """Return warnings about the buffer; for an unbounded field the recommendation is sufficient."""
    is_recommended = 0 < spec.recommended.buffer <= options.buffer
    if options.chunk_sizes is None or is_recommended or not _is_below(options.buffer, spec):
        return []
    return [
        f"buffer of {options.buffer} codes is below the receptive field ({_field_text(spec)}): "
        "small artefacts at block boundaries are possible"
    ]


def _look_ahead_warnings(options: StreamingOptions, spec: CodecSpec) -> list[str]:
    if options.chunk_sizes is None or spec.right_field is None:
        return []
    if options.look_ahead > spec.right_field:
        return [
            f"look_ahead of {options.look_ahead} codes is more than this codec uses "
            f"({spec.right_field} codes): it only delays the sound"
        ]
    return []


def _has_relation(spec: CodecSpec) -> bool:
    return spec.attention is AttentionKind.BIDIRECTIONAL


def _is_below(num_codes: int, spec: CodecSpec) -> bool:
    if spec.keeps_state:
        return False
    return spec.receptive_field is None or num_codes < spec.receptive_field


def _field_text(spec: CodecSpec) -> str:
    return "unbounded" if spec.receptive_field is None else f"{spec.receptive_field} codes"


def crossfade_samples(spec: CodecSpec, options: DecoderOptions) -> int:
    """Return the length of `crossfade_ms` in samples."""
    return round((options.crossfade_ms or 0.0) * spec.sample_rate / 1000)


def blend(block: np.ndarray, tail: np.ndarray | None) -> None:
    """Blend in place, linearly, from the previous block's rendering of these samples to this
    one's.
    """
    if tail is None or not len(tail):
        return
    import numpy as np

    size = min(len(tail), len(block))
    rising = ((np.arange(size) + 0.5) / len(tail)).astype(np.float32)
    block[:size] = tail[:size] * (1 - rising) + block[:size] * rising


def tail_size(spec: CodecSpec, window: DecodeWindow, fade: int) -> int:
    """Return how many samples after its block a window renders for the crossfade with the next
    one.
    """
    if not window.future_len:
        return 0
    ratio = spec.samples_per_code
    return min(fade, window.future_len * ratio.numerator // ratio.denominator)


def _last(items: tuple[int, ...], count: int) -> tuple[int, ...]:
    return items[-count:] if count > 0 else ()
