"""One stream's audio blocks: windows, attention masks and the sample grid.

A stream is cut into blocks of its own codes. A block is rendered as one *window*

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

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from decoder.base import (
    AttentionKind,
    CodecSpec,
    CodeRangeError,
    DecoderConfigError,
    DecoderError,
    DecodeWindow,
    PrependPromptSpeechTokens,
    SpeechChunk,
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


class DecoderStream:
    """Decoder state of one stream: the context of its next block.

    Holds codes only (at most `buffer` of them and the prompt); rendering is a pure function.
    `carry` None starts a new stream; a tuple, even an empty one, continues an earlier one: it has
    that stream's last codes, and `token_offset` is the number of its codes.
    """

    def __init__(
        self,
        spec: CodecSpec,
        options: StreamingOptions,
        *,
        prompt_codes: Sequence[int] = (),
        carry: Sequence[int] | None = None,
        token_offset: int = 0,
    ) -> None:
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
        self._options = options
        self._prompt = check_codes(prompt_codes, spec.codebook_size, "voice prompt")
        self._token_offset = token_offset
        self._origin = sample_index(token_offset, spec.samples_per_code)
        self._is_fresh = carry is None
        self.carry = _last(carried, options.buffer)
        """The last `buffer` codes after the newest window: what a follow-up request sends."""
        self._history_blocks = (CARRY_BLOCK,) * len(self.carry)
        self._num_codes = 0
        self._num_blocks = 0

    def __repr__(self) -> str:
        return (
            f"DecoderStream(blocks={self._num_blocks}, codes={self._num_codes}, "
            f"history={len(self.carry)}, prompt={len(self._prompt)})"
        )

    @property
    def num_codes(self) -> int:
        """Number of own codes passed to `window` so far."""
        return self._num_codes

    @property
    def next_token_offset(self) -> int:
        """Value of `token_offset` for a follow-up request that continues after the newest
        window.
        """
        return self._token_offset + self._num_codes

    def window(self, chunk: SpeechChunk) -> DecodeWindow:
        """Return the window of the next block, which then becomes history. Blocks come in order."""
        if (chunk.first_code, chunk.block_index) != (self._num_codes, self._num_blocks):
            raise ValueError(f"{chunk} does not follow {self}")
        if not chunk.codes:
            raise ValueError("a block has at least one code")
        codes = check_codes(chunk.codes, self._spec.codebook_size, "speech")
        future = check_codes(chunk.future, self._spec.codebook_size, "speech")
        check_frames(len(codes), self._spec, "number of codes in a block")
        check_frames(len(future), self._spec, "number of look-ahead codes")
        window = self._build(codes, future)
        self._remember(codes)
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

    def _remember(self, codes: tuple[int, ...]) -> None:
        buffer = self._options.buffer
        self._history_blocks = _last(
            self._history_blocks + (self._num_blocks,) * len(codes), buffer
        )
        self.carry = _last(self.carry + codes, buffer)
        self._num_codes += len(codes)
        self._num_blocks += 1


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
    _check_numbers(options)
    for size in options.chunk_sizes or ():
        check_frames(size, spec, "chunk_size")
    check_frames(options.buffer, spec, "buffer")
    check_frames(options.look_ahead, spec, "look_ahead")
    check_frames(options.look_ahead_of(0), spec, "first_look_ahead")
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


def _check_numbers(options: StreamingOptions) -> None:
    sizes = options.chunk_sizes
    if sizes is not None:
        if not sizes:
            raise DecoderConfigError("chunk_size is empty: give sizes, or none for one block")
        for size in sizes:
            if type(size) is not int or size <= 0:
                raise DecoderConfigError(f"chunk_size {size!r} is not a positive integer")
    for name in ("buffer", "look_ahead"):
        value = getattr(options, name)
        if type(value) is not int or value < 0:
            raise DecoderConfigError(f"{name} {value!r} is not an integer >= 0")
    first = options.first_look_ahead
    if first is not None and (type(first) is not int or not 0 <= first <= options.look_ahead):
        raise DecoderConfigError(
            f"first_look_ahead {first!r} is not an integer from 0 to the look_ahead, "
            f"{options.look_ahead}"
        )


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


def _last(items: tuple[int, ...], count: int) -> tuple[int, ...]:
    return items[-count:] if count > 0 else ()
