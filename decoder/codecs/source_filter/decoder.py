"""The natural voice's codec: files, options, batched streaming decoding, voices of clips.

Folder: config.json (sizes of `SpeechCodecConfig`, "type", "hop") and model.safetensors (names of
`SpeechCodec`, in the formats of `weights`). A voice is a row of `voice_tokens` codes, which stands
in front of every window; `encode` gives that of a clip. The encoder of voices is loaded at the
first `encode`, because most processes never use it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.base import (
    AttentionKind,
    AudioDecoder,
    CodecSpec,
    DecoderConfigError,
    DecodeWindow,
    PrependPromptSpeechTokens,
    StreamingOptions,
)
from decoder.clips import checked_clip
from decoder.codecs.common import built, finish_spec
from decoder.codecs.source_filter.config import NAME, SpeechCodecConfig
from decoder.codecs.source_filter.modules import (
    Decoder,
    FiniteScalarQuantizer,
    LogMel,
    VoiceEncoder,
)
from decoder.codecs.source_filter.render import ABSENT, Past, Rows, SourceFilterRenderer
from decoder.codecs.source_filter.weights import restored
from decoder.cuda.devices import own_stream
from decoder.registry import WEIGHTS_FILE, CodecSource
from decoder.streaming import check_windows
from decoder.weights import read_tensors, tensor_names
from decoder.window_inputs import stacked

CHUNK_SIZES = (3, 4, 8, 16, 32)  # a block is finished in time at 2.4 times real time
SILENT_CODES = 4  # in front of the first sound of a sentence; the shortest silence has six
DECODER, VOICE_ENCODER = "decoder.", "voice_encoder."

NetworkT = TypeVar("NetworkT", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class KeptState:
    """State of a stream: the position of its next code, the codes before it, and its past."""

    next_position: int
    codes: tuple[int, ...]
    past: Past


@dataclass(frozen=True, slots=True)
class Line:
    """One window as a row: codes to compute, with those before and after them that they see."""

    voice: tuple[int, ...]
    before: tuple[int, ...]
    codes: tuple[int, ...]
    after: tuple[int, ...]
    skipped: int  # codes that are computed and not emitted
    position: int  # of the first code to compute
    pitch: float  # semitones


class SourceFilterDecoder(AudioDecoder):
    """Codec of the natural voice: one FSQ codebook, convolutions, filtered pulses and noise.

    Streams keep their state from block to block, and streams at any place share a call.
    """

    supported_options = frozenset({"token_rate_hz", "max_batch", "pcm_format", "first_look_ahead"})

    def __init__(self, spec: CodecSpec, decoder: Decoder, source: CodecSource) -> None:
        self.spec = spec
        self.options = source.options
        self.device = source.device
        self._config, self._hop = decoder.config, decoder.config.hop
        self._source = source
        self._renderer = SourceFilterRenderer(decoder)
        self._voices: VoicesOfClips | None = None
        self._encoding = own_stream(source.device)

    @classmethod
    def create(cls, source: CodecSource) -> SourceFilterDecoder:
        """Create from a source; raises DecoderConfigError for an invalid file, tensor or rate."""
        if source.weights is None and not source.test_mode:
            raise DecoderConfigError(
                f"codec '{NAME}' needs weights: name a codec folder with {WEIGHTS_FILE}"
            )
        config = SpeechCodecConfig.from_dict(source.config)
        hop = source.config.get("hop", config.hop)
        if hop != config.hop:
            raise DecoderConfigError(f"{NAME} config: hop is {hop} but the sizes give {config.hop}")
        decoder = load_part(lambda: Decoder(config), DECODER, source)
        return cls(codec_spec(config, source), decoder, source)

    def batch_key(self, window: DecodeWindow) -> Hashable:
        """See AudioDecoder.batch_key: any windows can be combined."""
        return None

    def decode(self, windows: Sequence[DecodeWindow]) -> Tensor:
        """See AudioDecoder.decode: each window is the beginning of a stream."""
        return self.decode_next(windows, [None] * len(windows))[0]

    def decode_next(
        self, windows: Sequence[DecodeWindow], kept: Sequence[object]
    ) -> tuple[Tensor, list[object]]:
        """See AudioDecoder.decode_next. On a CPU each row is rendered alone, which is as fast.

        Raises CodeRangeError for an invalid code, and DecoderConfigError for a window without the
        voice, without the codes before its block, or that does not continue where its stream
        stopped.
        """
        check_windows(self, windows)
        states = [state if isinstance(state, KeptState) else None for state in kept]
        lines = list(map(self._line, windows, states))
        with torch.inference_mode():
            if self.device == "cpu":
                pairs = zip(lines, states, strict=True)
                parts = [self._rendered([line], [state]) for line, state in pairs]
                rows = parts[0][0] if len(parts) == 1 else stacked([row for row, _ in parts])
                pasts = [past for _, past in parts]
            else:
                rows, past = self._rendered(lines, states)
                pasts = [past.row(index) for index in range(len(lines))]
        behind = self._config.behind
        return rows, [
            KeptState(line.position + len(line.codes), last(line.before + line.codes, behind), past)
            for line, past in zip(lines, pasts, strict=True)
        ]

    def _line(self, window: DecodeWindow, state: KeptState | None) -> Line:
        voice, context = window.prompt_len, window.prompt_len + window.history_len
        if voice != self._config.voice_tokens:
            raise DecoderConfigError(
                f"codec '{NAME}' needs a voice of {self._config.voice_tokens} codes in front of "
                f"every window, not {voice}"
            )
        if state is not None and window.positions[context] != state.next_position:
            raise DecoderConfigError(
                f"a block at position {window.positions[context]} does not follow the stream's "
                f"state, which is at {state.next_position}"
            )
        first, end = voice if state is None else context, len(window.codes) - window.future_len
        return Line(
            voice=window.codes[:voice],
            before=() if state is None else state.codes,
            codes=window.codes[first:end],
            after=window.codes[end:][: self._config.ahead],
            skipped=context - first,
            position=window.positions[first],
            pitch=window.pitch,
        )

    def _rendered(
        self, lines: Sequence[Line], states: Sequence[KeptState | None]
    ) -> tuple[Tensor, Past]:
        """Return the emitted samples of one call, and the past that its streams keep."""
        fresh = self._renderer.beginning
        pasts = [fresh if state is None else state.past for state in states]
        past = pasts[0] if len(pasts) == 1 else Past.joined(pasts)
        samples, following = self._renderer.render(self._rows(lines), past)
        longest = max(len(line.codes) - line.skipped for line in lines)
        return samples[:, : longest * self._hop], following

    def _rows(self, lines: Sequence[Line]) -> Rows:
        config = self._config
        width = config.behind + max(len(line.codes) for line in lines) + config.ahead
        codes = torch.full((len(lines), width), ABSENT)
        for row, line in zip(codes, lines, strict=True):
            seen = line.before + line.codes + line.after
            row[config.behind - len(line.before) :][: len(seen)] = torch.tensor(seen)
        rows = Rows(
            codes,
            torch.tensor([line.voice for line in lines]),
            torch.tensor([len(line.codes) for line in lines]),
            torch.tensor([line.skipped for line in lines]),
            torch.tensor([line.position * self._hop for line in lines]),
            torch.tensor([2 ** (line.pitch / 12) for line in lines]),
        )
        return Rows(*(part.to(self.device) for part in rows))

    def encode(self, samples: np.ndarray) -> tuple[int, ...]:
        """Return the voice of a clip, mono float32 [S]: `voice_tokens` codes.

        Raises AudioFormatError for an empty, non-finite or multi-channel clip.
        """
        clip = torch.from_numpy(checked_clip(samples))
        if not self.spec.can_encode:
            raise DecoderConfigError("this codec's weights hold no encoder of voices")
        with self._encoding():
            if self._voices is None:
                self._voices = VoicesOfClips(self._config, self._source)
            with torch.inference_mode():
                tokens: list[int] = self._voices(clip[None].to(self.device))[0].tolist()
        return tuple(tokens)


class VoicesOfClips(nn.Module):
    """The encoder of voices and what is around it."""

    def __init__(self, config: SpeechCodecConfig, source: CodecSource) -> None:
        super().__init__()
        self.config = config
        self.mel = LogMel(config)
        width = self.mel.width
        self.encoder = load_part(lambda: VoiceEncoder(config, width), VOICE_ENCODER, source)
        self.quantizer = FiniteScalarQuantizer(config.levels)
        self.to(source.device)

    def forward(self, clip: Tensor) -> Tensor:
        """Map a clip [1, S] to codes [1, voice_tokens]; silence is added to a very short one."""
        least = max(2 * self.config.mel_n_fft, self.config.frame)
        clip = F.pad(clip, (0, max(0, least - clip.shape[1])))
        whole = clip.shape[1] // self.config.frame * self.config.frame
        codes: Tensor = self.quantizer(self.encoder(self.mel(clip[:, :whole])))[1]
        return codes


def last(codes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the last `count` codes."""
    return codes[len(codes) - count :] if count < len(codes) else codes


def codec_spec(config: SpeechCodecConfig, source: CodecSource) -> CodecSpec:
    """Return the spec of a source-filter codec."""
    spec = CodecSpec(
        name=NAME,
        sample_rate=config.sample_rate,
        samples_per_code=Fraction(config.hop),
        codebook_size=config.codebook_size,
        receptive_field=config.receptive_field,
        right_field=config.ahead,
        attention=AttentionKind.NONE,
        voice_codes=config.voice_tokens,
        voice_levels=config.levels,
        can_shift_pitch=True,
        recommended=StreamingOptions(
            CHUNK_SIZES,
            buffer=config.receptive_field,
            prepend=PrependPromptSpeechTokens.ROLLING,
            look_ahead=config.ahead,
            silent_codes=SILENT_CODES,
        ),
    )
    return replace(finish_spec(spec, source), can_encode=has_voices(source), keeps_state=True)


def has_voices(source: CodecSource) -> bool:
    """Return whether the weights hold the encoder of voices."""
    names = tensor_names(source.weights) if source.weights is not None else (VOICE_ENCODER,)
    return any(name.startswith(VOICE_ENCODER) for name in names)


def load_part(build: Callable[[], NetworkT], part: str, source: CodecSource) -> NetworkT:
    """Return a network on its device with the weights below `part`; without a file random ones."""
    network = built(build, source)
    if source.weights is not None:
        stored = read_tensors(source.weights, lambda name: name.startswith(part))
        try:
            own = {name.removeprefix(part): value for name, value in restored(stored).items()}
            network.load_state_dict(own)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise DecoderConfigError(f"codec weights {source.weights}: {reason}") from error
    return network.to(source.device).eval().requires_grad_(requires_grad=False)
