"""Common functions of the codecs: rates, options, weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from decoder.base import (
    CodecSpec,
    DecoderConfigError,
    DecoderOptions,
    DecodeWindow,
    StreamingOptions,
)
from decoder.encoders import can_encode
from decoder.registry import WEIGHTS_FILE, CodecSource
from decoder.streaming import validate_streaming
from decoder.weights import layer_of, load_weights, read_tensors

RANDOM_SEED = 0
NetworkT = TypeVar("NetworkT", bound=nn.Module)
CONVOLUTION_OPTIONS = frozenset(
    {"token_rate_hz", "max_batch", "pcm_format", "look_ahead", "first_look_ahead", "crossfade_ms"}
)


def codes_tensor(spec: CodecSpec, windows: Sequence[DecodeWindow]) -> Tensor:
    """Return int64 [B, F, codes_per_frame], on the host."""
    codes = torch.tensor([window.codes for window in windows])
    return codes.view(len(windows), -1, spec.codes_per_frame)


def finish_spec(spec: CodecSpec, source: CodecSource) -> CodecSpec:
    """Apply options and files to a spec; raises DecoderConfigError for invalid ones."""
    options = source.options
    wanted, rate = options.token_rate_hz, spec.codes_per_second
    if wanted is not None and not math.isclose(wanted, rate, rel_tol=1e-3):
        raise DecoderConfigError(
            f"audio_decoder_config: token_rate_hz is {wanted:g} but codec '{spec.name}' has "
            f"{rate:g} codes per second"
        )
    if options.look_ahead is not None:
        recommended = replace(spec.recommended, look_ahead=options.look_ahead)
        spec = replace(spec, recommended=recommended)
    if options.first_look_ahead is not None:
        recommended = replace(spec.recommended, first_look_ahead=options.first_look_ahead)
        spec = replace(spec, recommended=recommended)
    validate_streaming(spec.recommended, spec)
    _check_crossfade(spec, options.crossfade_ms or 0.0)
    return replace(spec, can_encode=can_encode(source), keeps_state=options.stateful)


def crossfading(source: CodecSource, spec: CodecSpec, crossfade_ms: float) -> CodecSource:
    """Set the source's crossfade, if unset, to `crossfade_ms` or the longest that the look-ahead
    allows.
    """
    if source.options.crossfade_ms is not None:
        return source
    fade_ms = min(crossfade_ms, _ahead_ms(spec))
    return replace(source, options=replace(source.options, crossfade_ms=fade_ms))


def _ahead_ms(spec: CodecSpec) -> float:
    return 1000 * spec.recommended.look_ahead / spec.codes_per_second


def _check_crossfade(spec: CodecSpec, crossfade_ms: float) -> None:
    ahead_ms = _ahead_ms(spec)
    if crossfade_ms > ahead_ms:
        raise DecoderConfigError(
            f"audio_decoder_config: crossfade_ms is {crossfade_ms:g} but the look-ahead of codec "
            f"'{spec.name}' renders only {ahead_ms:g} ms past a block: raise look_ahead"
        )


def chosen_codebooks(codec: str, in_all: int, options: DecoderOptions) -> int:
    """Return the number of codebooks of a stream: the option, at most those of the checkpoint."""
    wanted = options.num_codebooks
    if wanted is not None and wanted > in_all:
        raise DecoderConfigError(
            f"audio_decoder_config: num_codebooks is {wanted} but codec '{codec}' has {in_all}"
        )
    return wanted or in_all


def frame_streaming(spec: CodecSpec, frames: tuple[int, ...], left: int, right: int) -> CodecSpec:
    """Return the spec with recommended options and fields, given in frames."""
    per_frame = spec.codes_per_frame
    return replace(
        spec,
        receptive_field=left * per_frame,
        right_field=right * per_frame,
        recommended=StreamingOptions(
            chunk_sizes=tuple(count * per_frame for count in frames),
            buffer=left * per_frame,
            look_ahead=right * per_frame,
        ),
    )


def load_or_random(
    build: Callable[[], NetworkT],
    theirs: Mapping[str, str],
    source: CodecSource,
    rename: Callable[[str], tuple[str, ...]] = lambda name: (name,),
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors,
) -> NetworkT:
    """Return the decoding network on its device with its weights, or seeded random ones in test
    mode.

    `theirs` maps the network's layer names to the checkpoint's, which may contain more: encoders.
    `rename` converts names of other publications; several names mean equal parts, none that the
    tensor is left out. `convert` then changes the tensors; layers that it alone needs may have any
    name in `theirs`.
    """
    if source.weights is None and not source.test_mode:
        raise DecoderConfigError(
            f"codec '{source.name}' needs weights: name a codec folder with {WEIGHTS_FILE}"
        )
    return load_network(build, theirs, source, rename, convert)


def load_network(
    build: Callable[[], NetworkT],
    theirs: Mapping[str, str],
    source: CodecSource,
    rename: Callable[[str], tuple[str, ...]] = lambda name: (name,),
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors,
) -> NetworkT:
    """Return the network with its weights, regardless of the mode; see `load_or_random`."""
    network = built(build, source)
    if source.weights is not None:
        layers, prefix = set(theirs.values()), source.prefix

        def own(name: str) -> tuple[str, ...]:
            return rename(name.removeprefix(prefix)) if name.startswith(prefix) else ()

        found = read_tensors(
            source.weights,
            lambda name: any(layer_of(new) in layers for new in own(name)),
            allow_pickle=source.allow_pickle,
        )
        tensors: dict[str, Tensor] = {}
        for name, tensor in found.items():
            names = own(name)
            tensors |= zip(names, tensor.chunk(len(names)), strict=True)
        load_weights(network, convert(tensors), theirs, source.weights)
    return network.to(source.device).eval().requires_grad_(requires_grad=False)


def built(build: Callable[[], NetworkT], source: CodecSource) -> NetworkT:
    """Return a new network: its weights are seeded random ones, and undefined where the source has
    a file, from which all of them must be loaded.
    """
    mode = nullcontext() if source.weights is None else _Undefined()
    with torch.random.fork_rng(devices=[]), mode:
        torch.default_generator.manual_seed(RANDOM_SEED)  # the CPU's
        return build()


class _Undefined(TorchFunctionMode):
    """Leaves new weights as they are: drawing millions of random numbers takes 0.1 s."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            return None
        return func(*args, **kwargs or {})
