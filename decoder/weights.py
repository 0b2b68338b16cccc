"""Reader of a published codec's weights: names are mapped, weight norm is folded, checks are
strict.

Safetensors only; a pickle is read with PyTorch's restricted unpickler if the caller allows it.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from decoder.base import DecoderConfigError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
INDEX_SUFFIX = ".json"

# PyTorch writes a weight-normalised layer in two ways, both as magnitude and direction.
_WEIGHT_NORM = re.compile(r"(.*)\.(?:weight_[gv]|parametrizations\.weight\.original[01])$")
_MAGNITUDE = re.compile(r"(.*)\.(?:weight_g|parametrizations\.weight\.original0)$")
_DIRECTIONS = ("{}.weight_v", "{}.parametrizations.weight.original1")


def layer_of(name: str) -> str:
    """Return the layer of a tensor, also of a weight-normalised one."""
    match = _WEIGHT_NORM.match(name)
    return match[1] if match else name.rpartition(".")[0]


def read_tensors(
    path: Path, is_wanted: Callable[[str], bool], *, allow_pickle: bool = False
) -> dict[str, Tensor]:
    """Return the selected tensors of a file, or of an index's files, by name, with weight norm
    folded into plain weights.

    Raises DecoderConfigError if a file cannot be read, or is a pickle and pickles are not allowed.
    """
    if path.suffix == INDEX_SUFFIX:
        tensors: dict[str, Tensor] = {}
        wanted = {file for name, file in _read_index(path).items() if is_wanted(name)}
        for file in sorted(wanted):
            tensors |= read_tensors(path.parent / file, is_wanted)
        return tensors
    if path.suffix in PICKLE_SUFFIXES:
        found = _read_pickle(path, allow_pickle=allow_pickle)
        return fold_weight_norm({name: t for name, t in found.items() if is_wanted(name)})
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in sorted(file.keys()) if is_wanted(name)]
            return fold_weight_norm({name: file.get_tensor(name) for name in names})
    except (OSError, SafetensorError) as error:
        raise DecoderConfigError(f"cannot read codec weights {path}: {error}") from error


def tensor_names(path: Path, *, allow_pickle: bool = False) -> tuple[str, ...]:
    """Return the names in a file or an index; of a safetensors file only its header is read."""
    if path.suffix == INDEX_SUFFIX:
        return tuple(sorted(_read_index(path)))
    if path.suffix in PICKLE_SUFFIXES:
        return tuple(sorted(_read_pickle(path, allow_pickle=allow_pickle)))
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return tuple(sorted(file.keys()))
    except (OSError, SafetensorError) as error:
        raise DecoderConfigError(f"cannot read codec weights {path}: {error}") from error


def _read_index(path: Path) -> Mapping[str, str]:
    """Return the file of each tensor."""
    try:
        files: Mapping[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        found = {str(name): Path(file).name for name, file in files.items()}
        other = next((file for file in found.values() if not file.endswith(".safetensors")), None)
        if other is not None:  # it may be this index itself
            raise ValueError(f"{other} is not a safetensors file")
        return found
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DecoderConfigError(f"cannot read {path}: {error!r}") from error


def _read_pickle(path: Path, *, allow_pickle: bool) -> dict[str, Tensor]:
    if not allow_pickle:
        target = path.with_name("model.safetensors")
        raise DecoderConfigError(
            f"{path} is a pickle, which can run code when it is read: allow it with "
            f'--allow-pickle, or convert it once with: python -c "import torch; '
            f"from safetensors.torch import save_file; "
            f"save_file(torch.load('{path}', weights_only=True), '{target}')\""
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DecoderConfigError(f"cannot read codec weights {path}: {reason}") from error
    if not isinstance(found, dict):
        raise DecoderConfigError(f"{path} does not hold a table of tensors")
    return {str(name): value for name, value in found.items() if isinstance(value, Tensor)}


def fold_weight_norm(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each magnitude and direction as one weight, g * v / |v|; |v| over all but
    dimension 0.
    """
    folded = dict(tensors)
    for name in tensors:
        match = _MAGNITUDE.match(name)
        directions = [form.format(match[1]) for form in _DIRECTIONS] if match else []
        for direction in directions:
            if match and direction in folded:
                magnitude, v = folded.pop(name), folded.pop(direction)
                norm = v.flatten(1).norm(dim=1).view(-1, *[1] * (v.dim() - 1))
                folded[match[1] + ".weight"] = v * (magnitude / norm)
    return folded


def load_weights(
    module: nn.Module, tensors: Mapping[str, Tensor], theirs: Mapping[str, str], source: Path
) -> None:
    """Load a checkpoint's tensors into a module.

    `theirs` maps a module's name to the checkpoint's name of the same layer. DecoderConfigError
    names, as the checkpoint does, the first tensor that is missing, left over or misshapen.
    """
    left = dict(tensors)
    state = {}
    for name, own in module.state_dict().items():
        layer, _, kind = name.rpartition(".")
        wanted = f"{theirs[layer]}.{kind}"
        if wanted not in left:
            raise DecoderConfigError(f"codec weights {source} lack '{wanted}'")
        tensor = left.pop(wanted)
        if tensor.shape != own.shape:
            raise DecoderConfigError(
                f"codec weights {source}: '{wanted}' has shape {tuple(tensor.shape)}, but the "
                f"configuration gives {tuple(own.shape)}"
            )
        state[name] = tensor.float()
    if left:
        raise DecoderConfigError(f"codec weights {source}: unknown tensor '{min(left)}'")
    module.load_state_dict(state)
