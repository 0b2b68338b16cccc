"""Where a checkpoint is: a local folder, or a repository of the Hugging Face hub, by its name.

    name ─▶ a folder? ─yes─▶ it
              └─no─▶ owner/name ─▶ list ─▶ download what is not cached ─▶ compare hashes ─▶ folder

All files are of one commit. Offline only the cache is looked at. Nothing of a checkpoint is read
here, and no code or pickle from it is run.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llm import CheckpointError
from tts.hub_files import TENSOR_SUFFIX, HubFile, files_to_fetch, has_weights, is_intact

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

logger = logging.getLogger(__name__)

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
CONFIG_FILE = "config.json"
INDEX_SUFFIX = ".index.json"
ON = ("1", "ON", "YES", "TRUE")  # what the hub's own library takes for on
MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class HubOptions:
    """How to reach the hub; empty means what the hub's own library does."""

    revision: str = "main"  # branch, tag or commit
    offline: bool = False
    allow_pickle: bool = False
    config_file: str = CONFIG_FILE  # what every repository of the kind has
    fetches_weights: bool = True  # False: only what describes them, which is small
    token: str = field(default="", repr=False)
    endpoint: str = ""
    cache_dir: Path | None = None

    def with_environment(self, environ: Mapping[str, str]) -> HubOptions:
        """The same, with what the variables say that every tool of the hub reads."""
        home = environ.get("HF_HOME")
        cache = environ.get("HF_HUB_CACHE") or (f"{home}/hub" if home else "")
        return replace(
            self,
            cache_dir=Path(cache).expanduser() if cache else self.cache_dir,
            offline=self.offline or environ.get("HF_HUB_OFFLINE", "").upper() in ON,
            token=environ.get("HF_TOKEN", self.token),
            endpoint=environ.get("HF_ENDPOINT", self.endpoint).rstrip("/"),
        )


def is_hub_name(name: str) -> bool:
    """Whether a name is a repository's, and not a folder's."""
    return not Path(name).expanduser().is_dir() and REPOSITORY.fullmatch(name) is not None


def split_revision(name: str) -> tuple[str, str]:
    """A repository and its revision, of `owner/name@revision`; 'main' where none is given."""
    repository, _, revision = name.rpartition("@")
    if revision and is_hub_name(repository):
        return repository, revision
    return name, "main"


def find_checkpoint(name: str, options: HubOptions | None = None) -> Path:
    """The folder of a checkpoint, downloaded first where it must be.

    Raises `CheckpointError` saying what to do: no such folder or repository, not allowed to read
    it, not reachable, not cached, damaged on the way, weights in pickles only.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
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
        """The folder of a complete earlier download. Raises `CheckpointError` without one."""
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
        """The folder, with everything in it that the hub has now.

        Where the hub cannot be reached an earlier, complete download has to do.
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
        # By its symbolic name once, so that the cache knows later what it stood for.
        folder = self._download(config, self.options.revision).parent
        if folder.name != commit:
            raise CheckpointError(f"{self.name} changed while it was listed; try again")
        for file in wanted:
            if file is not config and not (folder / file.name).is_file():
                self._download(file, commit)
        return folder

    def _list(self) -> tuple[str, list[HubFile]]:
        """The commit of the revision, and its files."""
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
        """One file into the cache, with a progress bar on a terminal; checked when it is there."""
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
        """The library's errors as `CheckpointError`, or `_UnreachableError`."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            yield
        except HfHubHTTPError as error:
            raise self._refusal(error) from error
        except _transport_errors() as error:
            place = self.options.endpoint or "the hub"
            raise _UnreachableError(f"cannot get {self.name} from {place}: {error}") from error

    def _refusal(self, error: HfHubHTTPError) -> Exception:
        """What a status means, and what to do about it."""
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
    """OSError, and the HTTP library's base error: which library it is has changed over time."""
    from huggingface_hub.errors import HfHubHTTPError

    return tuple(base for base in HfHubHTTPError.__mro__[1:] if issubclass(base, Exception))[:-1]


class _UnreachableError(Exception):
    """The hub gave no answer, or none that says anything about the repository."""


def missing_weights(folder: Path) -> list[str]:
    """Weight files that are not there: those that an index names; without one, any at all."""
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
