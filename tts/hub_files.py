"""Which files of a hub repository a checkpoint needs, and whether one came over intact."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llm import CheckpointError

DATA_SUFFIXES = (".json", ".jinja", ".txt", ".wav", ".flac", ".ogg", ".mp3")
SAMPLES = "samples"  # recordings and their codes, which some families ship as pickled tensors
SAMPLE_CODES = ".pt"
TENSOR_SUFFIX = ".safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
PICKLE_NAME = "pytorch_model"  # what transformers calls its pickles: others hold other things
OTHER_FORMATS = ("original", "onnx", "openvino", "coreml", "gguf", "runs")  # the same model again
EARLIER = "checkpoint-"  # folders that training left
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file as the hub lists it. Large files have a SHA-256, others git's id."""

    name: str
    num_bytes: int  # 0: not told, as by some mirrors
    sha256: str = ""
    git_id: str = ""


def files_to_fetch(
    source: str, files: Sequence[HubFile], *, allow_pickle: bool
) -> tuple[HubFile, ...]:
    """Configuration, tokenizer, template and voice files, and the weights in one format.

    Raises `CheckpointError` naming `source` when there are pickles only and they are not allowed.
    """
    usable = [file for file in files if _is_plain(file.name)]
    data = [
        file
        for file in usable
        if file.name.endswith(DATA_SUFFIXES) or (allow_pickle and _is_sample(file.name))
    ]
    tensors = _without_second_copies(f for f in usable if f.name.endswith(TENSOR_SUFFIX))
    if tensors:
        return (*data, *tensors)
    pickles = [file for file in usable if has_weights(file.name)]
    if pickles and not allow_pickle:
        names = ", ".join(file.name for file in pickles[:3])
        raise CheckpointError(
            f"the weights of {source} are pickles ({names}), which may hold code; use a repository "
            "with safetensors, or allow them with --allow-pickle"
        )
    return (*data, *pickles)


def has_weights(name: str) -> bool:
    """Whether a file of this name holds weights: safetensors, or a pickle of transformers."""
    path = PurePosixPath(name)
    is_pickle = path.suffix in PICKLE_SUFFIXES and path.name.startswith(PICKLE_NAME)
    return path.suffix == TENSOR_SUFFIX or is_pickle


def _is_sample(name: str) -> bool:
    path = PurePosixPath(name)
    return path.parts[0] == SAMPLES and path.suffix == SAMPLE_CODES


def _is_plain(name: str) -> bool:
    """Whether a name stays inside the folder and is not of another format's copy."""
    parts = PurePosixPath(name).parts
    return not (
        not parts
        or name.startswith("/")
        or "\\" in name
        or any(part.startswith(".") for part in parts)
        or parts[0] in OTHER_FORMATS
        or parts[0].startswith(EARLIER)
    )


def _without_second_copies(files: Iterable[HubFile]) -> list[HubFile]:
    """Some repositories hold all weights twice: for transformers, and as consolidated.*."""
    found = list(files)
    own = [f for f in found if not PurePosixPath(f.name).name.startswith("consolidated")]
    return own or found


def is_intact(path: Path, file: HubFile) -> bool:
    """Whether a downloaded file is the one that the hub lists."""
    num_bytes = path.stat().st_size
    if file.num_bytes not in (0, num_bytes):
        return False
    if file.sha256:
        return _digest(path, hashlib.sha256()) == file.sha256
    if file.git_id:
        header = f"blob {num_bytes}\0".encode()
        return _digest(path, hashlib.sha1(header, usedforsecurity=False)) == file.git_id
    return True


def _digest(path: Path, digest: hashlib._Hash) -> str:
    with path.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
