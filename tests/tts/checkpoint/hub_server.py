"""A model hub on the loopback interface: the part of the real one's HTTP that downloads use.

Repositories are dictionaries of bytes. Tests make it refuse, break off and damage what it sends.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


def git_id(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@dataclass
class Repo:
    """One model; every revision is a commit with files."""

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": "a" * 40})
    gated: bool = False  # can be listed but not downloaded
    token: str = ""  # required for downloads when set

    @classmethod
    def of_folder(cls, folder: Path, **values: object) -> Repo:
        paths = [path for path in folder.rglob("*") if path.is_file()]
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return cls(files, **values)  # type: ignore[arg-type]


@dataclass
class Hub:
    """State of the hub: repositories, planted failures and recorded requests."""

    repos: dict[str, Repo] = field(default_factory=dict)
    url: str = ""
    cut_after: int = 0  # cut the next large file after that many bytes
    damaged: str = ""  # name of a file that is sent with wrong bytes
    status: int = 0  # status of every response
    downloads: list[str] = field(default_factory=list)  # names, and "from N" where resumed
    stuck: str = ""  # name of a file whose data are held back until `released`
    waits: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    strange: list[str] = field(default_factory=list)  # other requests of the hub's library

    def siblings(self, repo: Repo) -> list[dict[str, object]]:
        listed = []
        for name, data in repo.files.items():
            entry: dict[str, object] = {
                "rfilename": name,
                "size": len(data),
                "blobId": git_id(data),
            }
            if is_large(name):
                sha = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"size": len(data), "sha256": sha, "pointerSize": 130}
            listed.append(entry)
        return listed


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Write no request log: tests read standard error."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        if self.hub.status:
            self._refuse(self.hub.status)
            return
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._list("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
        elif len(parts) < 5 or parts[2] != "resolve":
            self.hub.strange.append(self.path)
            self._refuse(404)
        else:
            revision, name = parts[3], "/".join(parts[4:])
            self._send_file("/".join(parts[:2]), revision, name, with_body)

    def _allowed(self, repo: Repo) -> bool:
        return not repo.token or self.headers.get("Authorization") == f"Bearer {repo.token}"

    def _find(self, name: str, revision: str) -> tuple[Repo, str] | None:
        repo = self.hub.repos.get(name)
        if repo is None or (not repo.gated and not self._allowed(repo)):
            sent = self.headers.get("Authorization")
            self._refuse(
                401, None if sent else "RepoNotFound", "Invalid credentials" if sent else ""
            )
            return None
        commit = repo.revisions.get(revision, revision)
        if commit not in repo.revisions.values():
            self._refuse(404, "RevisionNotFound")
            return None
        return repo, commit

    def _list(self, name: str, revision: str) -> None:
        found = self._find(name, revision)
        if found is not None:
            repo, commit = found
            listed = {"id": name, "sha": commit, "siblings": self.hub.siblings(repo)}
            self._send(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})

    def _send_file(self, repo_name: str, revision: str, name: str, with_body: bool) -> None:
        found = self._find(repo_name, revision)
        if found is None:
            return
        repo, commit = found
        if repo.gated and not self._allowed(repo):
            self._refuse(401, "GatedRepo")
            return
        data = repo.files[name]
        tag = hashlib.sha256(data).hexdigest() if is_large(name) else git_id(data)
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        first = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
        if name == self.hub.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if not with_body:
            self._send(200, data, headers, with_body=False)
            return
        if name == self.hub.stuck:
            self.hub.waits.set()
            self.hub.released.wait(60)
        self.hub.downloads.append(f"{name} from {first}" if first else name)
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self._send(206 if first else 200, data[first:], headers, cut=self._cut(name))

    def _cut(self, name: str) -> int:
        cut, self.hub.cut_after = self.hub.cut_after, 0 if is_large(name) else self.hub.cut_after
        return cut if is_large(name) else 0

    def _refuse(self, status: int, code: str | None = None, message: str = "") -> None:
        headers = {"X-Error-Code": code} if code else {}
        if message:
            headers["X-Error-Message"] = f"{message} in Authorization header"
        self._send(status, b"{}", headers)

    def _send(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str],
        *,
        with_body: bool = True,
        cut: int = 0,
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not with_body or self.command == "HEAD":
            return
        self.wfile.write(data[:cut] if cut else data)
        if cut:
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    """HTTP server whose clients may disconnect in the middle of a response."""

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextmanager
def serving_hub(**repos: Repo) -> Iterator[Hub]:
    """Serve repositories `acme/NAME` until the block ends."""
    hub = Hub({f"acme/{name}": repo for name, repo in repos.items()})
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
