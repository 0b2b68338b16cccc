"""Checkpoints by name: a local folder, or a repository of the Hugging Face hub.

    name ─▶ a folder? ─yes─▶ it
              ├─no─▶ a GGUF file? ─yes─▶ the folder of its contents
              └─no─▶ owner/name ─▶ list ─▶ download what is not cached ─▶ compare hashes ─▶ folder

All files are of one commit. Offline only the cache is used. No code or pickle of a checkpoint is
run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from llm import CheckpointError
from tts.checkpoint.gguf import gguf_folder, is_gguf

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

DATA_SUFFIXES = (".json", ".jinja", ".txt", ".wav", ".flac", ".ogg", ".mp3")
SAMPLES = "samples"  # recordings and their codes, pickled tensors in some families
SAMPLE_CODES = ".pt"
TENSOR_SUFFIX = ".safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
PICKLE_NAME = "pytorch_model"  # weights by transformers; other pickles are no weights
OTHER_FORMATS = (
    "original",
    "onnx",
    "openvino",
    "coreml",
    "gguf",
    "runs",
)  # copies of the same model
EARLIER = "checkpoint-"  # folders of earlier training steps
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file in the hub's list. Large files have a SHA-256, others git's id."""

    name: str
    num_bytes: int  # 0: unknown, as from some mirrors
    sha256: str = ""
    git_id: str = ""


def files_to_fetch(
    source: str, files: Sequence[HubFile], *, allow_pickle: bool
) -> tuple[HubFile, ...]:
    """Select configuration, tokenizer, template and voice files, and weights of one format.

    Raises `CheckpointError` with `source` if all weights are pickles and those are not allowed.
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
    """Whether a name stays inside the folder and is not part of a copy in another format."""
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
    """Drop weights in another layout than that of transformers: some repositories hold both."""
    found = list(files)
    named = [f for f in found if PurePosixPath(f.name).name.startswith("transformers-")]
    own = [f for f in found if not PurePosixPath(f.name).name.startswith("consolidated")]
    return named or own or found


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


logger = logging.getLogger(__name__)

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
CONFIG_FILE = "config.json"
INDEX_SUFFIX = ".index.json"
ON = ("1", "ON", "YES", "TRUE")  # true values of the hub's own library
MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class HubOptions:
    """Settings of the hub; empty values are the defaults of the hub's own library.

    `user_cache` is for what is written from GGUF files; None: .cache in the user's home.
    """

    revision: str = "main"  # branch, tag or commit
    offline: bool = False
    allow_pickle: bool = False
    config_file: str = CONFIG_FILE  # which every repository of the kind has
    fetches_weights: bool = True  # False: configuration files only
    token: str = field(default="", repr=False)
    endpoint: str = ""
    cache_dir: Path | None = None
    user_cache: Path | None = None

    def with_environment(self, environ: Mapping[str, str]) -> HubOptions:
        """Return the options with the variables that all tools of the hub read, and the cache."""
        home = environ.get("HF_HOME")
        cache = environ.get("HF_HUB_CACHE") or (f"{home}/hub" if home else "")
        user_cache = environ.get("XDG_CACHE_HOME")
        return replace(
            self,
            user_cache=Path(user_cache) if user_cache else self.user_cache,
            cache_dir=Path(cache).expanduser() if cache else self.cache_dir,
            offline=self.offline or environ.get("HF_HUB_OFFLINE", "").upper() in ON,
            token=environ.get("HF_TOKEN", self.token),
            endpoint=environ.get("HF_ENDPOINT", self.endpoint).rstrip("/"),
        )


def is_hub_name(name: str) -> bool:
    """Whether a name is a repository's, and not a folder's."""
    is_here = Path(name).expanduser().is_dir() or is_gguf(name)
    return not is_here and REPOSITORY.fullmatch(name) is not None


def split_revision(name: str) -> tuple[str, str]:
    """Split `owner/name@revision`; the revision is 'main' if none is given."""
    repository, _, revision = name.rpartition("@")
    if revision and is_hub_name(repository):
        return repository, revision
    return name, "main"


def find_checkpoint(name: str, options: HubOptions | None = None) -> Path:
    """Return the folder of a checkpoint, which is downloaded first unless it is cached.

    A GGUF file's folder is written first. Raises `CheckpointError` with what to do: no such folder
    or repository, no permission, not reachable, not cached, damaged in transit, weights in pickles
    only, a GGUF file that cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if is_gguf(name):
        return gguf_folder(path, options.user_cache if options else None)
    if not is_hub_name(name):
        raise CheckpointError(f"{name} is neither a folder nor a model of the hub (owner/name)")
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            f"{name} is no folder here; to download it from the hub: pip install 'sonant[hub]'"
        ) from error
    repository = Repository(name, options or HubOptions())
    return repository.cached() if repository.options.offline else repository.fetch()


class Repository:
    """One repository at one revision. Needs huggingface_hub."""

    def __init__(self, name: str, options: HubOptions) -> None:
        from huggingface_hub import HfApi

        self.name = name
        self.options = options
        self._api: HfApi = HfApi(
            endpoint=options.endpoint or None, token=options.token or None, library_name="sonant"
        )

    def cached(self) -> Path:
        """Return the folder of an earlier, complete download. Raises `CheckpointError`."""
        folder = self._cached_folder()
        if folder is None:
            raise CheckpointError(
                f"{self.name} ({self.options.revision}) has not been downloaded; "
                "run once without --offline"
            )
        missing = missing_weights(folder)
        if missing:
            raise CheckpointError(
                f"the download of {self.name} is incomplete, {missing[0]} is missing; "
                "run once without --offline"
            )
        return folder

    def _cached_folder(self) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(
            self.name,
            self.options.config_file,
            cache_dir=self.options.cache_dir,
            revision=self.options.revision,
        )
        return Path(found).parent if isinstance(found, str) else None

    def fetch(self) -> Path:
        """Download the revision's current files and return their folder.

        If the hub cannot be reached, an earlier and complete download is used.
        """
        try:
            with self._explained():
                commit, files = self._list()
        except _UnreachableError as error:
            folder = self._cached_folder()
            if folder is None or (self.options.fetches_weights and missing_weights(folder)):
                raise CheckpointError(str(error)) from error
            logger.warning("%s; using the earlier download %s", error, folder)
            return folder
        wanted = files_to_fetch(self.name, files, allow_pickle=self.options.allow_pickle)
        wanted_config = self.options.config_file
        config = next((file for file in wanted if file.name == wanted_config), None)
        if config is None or not any(has_weights(file.name) for file in wanted):
            lacking = wanted_config if config is None else f"*{TENSOR_SUFFIX}"
            raise CheckpointError(f"{self.name} has no {lacking}: it is no checkpoint")
        if not self.options.fetches_weights:
            wanted = tuple(file for file in wanted if not has_weights(file.name))
        size = sum(file.num_bytes for file in wanted) / MEBIBYTE
        logger.info("%s at %s: %d files, %.1f MiB", self.name, commit, len(wanted), size)
        # By its symbolic name once, so that the cache maps the name to the commit.
        folder = self._download(config, self.options.revision).parent
        if folder.name != commit:
            raise CheckpointError(f"{self.name} changed while it was listed; try again")
        for file in wanted:
            if file is not config and not (folder / file.name).is_file():
                self._download(file, commit)
        return folder

    def _list(self) -> tuple[str, list[HubFile]]:
        """Return the commit of the revision, and its files."""
        info = self._api.model_info(self.name, revision=self.options.revision, files_metadata=True)
        files = [
            HubFile(
                name=sibling.rfilename,
                num_bytes=sibling.size or 0,
                sha256=sibling.lfs.sha256 if sibling.lfs else "",
                git_id="" if sibling.lfs else sibling.blob_id or "",
            )
            for sibling in info.siblings or ()
        ]
        return info.sha or "", files

    def _download(self, file: HubFile, revision: str) -> Path:
        """Download one file into the cache, with a progress bar on a terminal, and check it."""
        try:
            with self._explained():
                path = Path(
                    self._api.hf_hub_download(
                        self.name, file.name, revision=revision, cache_dir=self.options.cache_dir
                    )
                )
        except _UnreachableError as error:
            raise CheckpointError(f"{error}; whole files are kept, so run it again") from error
        if not is_intact(path, file):
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise CheckpointError(
                f"{file.name} of {self.name} is not the file that the hub lists: damaged on the "
                "way, or replaced; it has been removed, so run it again"
            )
        logger.info("%s: %s, %.1f MiB", self.name, file.name, file.num_bytes / MEBIBYTE)
        return path

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert the library's errors to `CheckpointError` or `_UnreachableError`."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            yield
        except HfHubHTTPError as error:
            raise self._refusal(error) from error
        except _transport_errors() as error:
            place = self.options.endpoint or "the hub"
            raise _UnreachableError(f"cannot get {self.name} from {place}: {error}") from error

    def _refusal(self, error: HfHubHTTPError) -> Exception:
        """Return the error for an HTTP status, with what to do about it."""
        from huggingface_hub.errors import (
            GatedRepoError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        name, page = self.name, f"{self._api.endpoint}/{self.name}"
        status = error.response.status_code
        if isinstance(error, GatedRepoError):
            return CheckpointError(
                f"{name} is gated: accept its terms at {page}, then set HF_TOKEN to a token of "
                f"that account ({self._api.endpoint}/settings/tokens)"
            )
        if isinstance(error, RevisionNotFoundError):
            return CheckpointError(f"{name} has no revision '{self.options.revision}'")
        if status in (401, 403) and self.options.token:
            return CheckpointError(
                f"HF_TOKEN may not read {name}: it is wrong, has expired or lacks the permission; "
                f"make one at {self._api.endpoint}/settings/tokens"
            )
        if isinstance(error, RepositoryNotFoundError) or status == 401:
            return CheckpointError(
                f"there is no folder {name} here and no public model {name} on the hub; "
                "for a private or gated one set HF_TOKEN"
            )
        return _UnreachableError(f"the hub answers {status} for {name}: {error}")


def _transport_errors() -> tuple[type[Exception], ...]:
    """Return OSError and the HTTP library's base error; the library differs by version."""
    from huggingface_hub.errors import HfHubHTTPError

    return tuple(base for base in HfHubHTTPError.__mro__[1:] if issubclass(base, Exception))[:-1]


class _UnreachableError(Exception):
    """The hub did not answer, or its answer is not about the repository."""


def missing_weights(folder: Path) -> list[str]:
    """List the weight files of an index that are missing; without an index, any weight file."""
    wanted = {name for index in folder.glob(f"*{INDEX_SUFFIX}") for name in _shards(index)}
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    if wanted or any(has_weights(path.name) for path in folder.rglob("*")):
        return missing
    return [f"*{TENSOR_SUFFIX}"]


def _shards(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"cannot read {index}: {error!r}") from error
