"""Identity of a codec: what the meaning of its codes depends on, as a digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from decoder.base import CodecSpec
from decoder.registry import find_files


def codec_identity(folder_or_name: str | Path, weights: str, spec: CodecSpec) -> str:
    """Return the SHA-256, in hexadecimal, of a codec's name, sizes and weights.

    The arguments are those of `create_decoder`, and the specification of its result. It is the same
    on every machine and in every folder. Reads all weights: about a second per gigabyte.
    """
    files = find_files(folder_or_name, weights)
    sizes = [files.name, files.config, spec.codes_per_frame]
    digest = hashlib.sha256(json.dumps(sizes, sort_keys=True).encode())
    if files.weights is not None and files.prefix:
        _add_tensors(digest, files.weights, files.prefix)
    elif files.weights is not None:
        with files.weights.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _add_tensors(digest: hashlib._Hash, weights: Path, prefix: str) -> None:
    """Add the codec's part of a language model's weights, however they are divided into files."""
    import torch

    from decoder.weights import read_tensors

    tensors = read_tensors(weights, lambda name: name.startswith(prefix))
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].flatten().contiguous().view(torch.uint8).numpy().tobytes())
