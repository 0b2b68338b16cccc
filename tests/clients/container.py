"""Builder and runner of images without a container engine: a Debian root, namespaces and chroot.

Only the instructions and flags of deploy/Dockerfile are known. It needs root, `mmdebstrap` (for the
base image), `unshare`, `nsenter`, `setpriv` and `ip`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import dockerfile

PROGRAMS = ("mmdebstrap", "unshare", "nsenter", "setpriv", "ip")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = "/run/certificates.pem"
STEP_S = 900
STOP_S = 60


def is_possible() -> bool:
    """Whether this machine and user can build and run images."""
    return os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


@dataclass
class Image:
    """A root file system, and how a container of it is started."""

    root: Path
    environ: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    user: str = "0:0"
    folder: str = "/"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    health_command: tuple[str, ...] = ()


class Builder:
    """Builds stages of a Dockerfile in a folder. A stage is built once, for one `FROM`."""

    def __init__(self, path: Path, context: Path, folder: Path, arguments: Mapping[str, str]):
        self._context, self._folder, self._given = context, folder, arguments
        self._globals: dict[str, str] = {}
        self._stages: dict[str, list[dockerfile.Command]] = {}
        self._images: dict[str, Image] = {}
        steps: list[dockerfile.Command] = []
        for step in dockerfile.parse_file(str(path)):
            if step.cmd == "FROM":
                steps = self._stages[step.value[2]] = []
            elif not self._stages:
                name, _, default = step.value[0].partition("=")
                self._globals[name] = arguments.get(name, default)
                continue
            steps.append(step)

    def build(self, stage: str) -> Image:
        """Return the image of a stage, which is built first if needed."""
        if stage not in self._images:
            self._images[stage] = self._built(stage)
        return self._images[stage]

    def _built(self, stage: str) -> Image:
        first, *steps = self._stages[stage]
        base = expanded(first.value[0], self._globals)
        image = self.build(base) if base in self._stages else self._debian(base, stage)
        variables: dict[str, str] = {}
        for step in steps:
            print(f"{stage}: {step.original}", flush=True)
            if step.cmd == "ARG":
                name, _, default = step.value[0].partition("=")
                variables[name] = self._given.get(name, default)
            else:
                self._apply(step, image, variables)
        return image

    def _debian(self, base: str, stage: str) -> Image:
        """Return the Debian release of an image's tag, such as debian:bookworm-slim."""
        found = re.fullmatch(r"debian:(\w+)-slim", base)
        assert found, f"{base} is not a Debian release"
        kept = self._folder / found[1]
        if not kept.exists():
            command = [
                "mmdebstrap",
                "--quiet",
                "--variant=minbase",
                "--include=apt",
                found[1],
                kept,
            ]
            subprocess.run(command, check=True, timeout=STEP_S)
        root = self._folder / stage
        subprocess.run(["cp", "-a", kept, root], check=True)
        return Image(root)

    def _apply(self, step: dockerfile.Command, image: Image, variables: dict[str, str]) -> None:
        values = tuple(expanded(value, {**variables, **image.environ}) for value in step.value)
        match step.cmd:
            case "RUN":
                self._run(step, image, variables)
            case "COPY":
                self._copy(values[:-1], image, values[-1])
            case "ENV":
                image.environ |= dict(zip(values[::2], values[1::2], strict=True))
            case "USER":
                image.user = values[0]
            case "WORKDIR":
                image.folder = values[0]
                (image.root / values[0].lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "ENTRYPOINT":
                image.entrypoint = values
            case "CMD":
                image.command = values
            case "HEALTHCHECK":
                assert values[0] == "CMD"
                image.health_command = values[1:]
            case other:
                assert other == "EXPOSE", f"{other} is not known"

    def _copy(self, sources: Sequence[str], image: Image, target: str) -> None:
        folder = image.root / image.folder.lstrip("/")
        for source in sources:
            path = self._context / source
            if path.is_dir():
                unneeded = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, folder / target, ignore=unneeded)
            else:
                shutil.copy2(path, folder / target)

    def _run(self, step: dockerfile.Command, image: Image, variables: dict[str, str]) -> None:
        """Run a step as root with the network of this machine and its pip's certificates."""
        root = shlex.quote(str(image.root))
        lines = [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
        environ = {"HOME": "/root", **variables, **image.environ}
        if certificates := os.environ.get("PIP_CERT"):
            environ["PIP_CERT"] = CERTIFICATES
            lines += bound(Path(certificates), image.root, CERTIFICATES)
        for flag in step.flags:
            kind, *pairs = flag.removeprefix("--mount=").split(",")
            options = dict(pair.split("=") for pair in pairs)
            assert kind == "type=bind"
            source = self.build(options["from"]).root / options["source"].lstrip("/")
            lines += bound(source, image.root, options["target"])
        variables_text = [f"{name}={text}" for name, text in environ.items()]
        command = ["chroot", str(image.root), "env", "-i", *variables_text]
        command += ["sh", "-ec", f"cd {image.folder}; {step.value[0]}"]
        script = "\n".join([*lines, f"exec {shlex.join(command)}"])
        unshared = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        subprocess.run([*unshared, "sh", "-ec", script], check=True, timeout=STEP_S)


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replace `${NAME}` as the Dockerfile's own instructions do."""
    return re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], text)


def bound(source: Path, root: Path, target: str) -> list[str]:
    """Return shell commands that mount a file or folder read-only into a root."""
    path = root / target.lstrip("/")
    if source.is_dir():
        path.mkdir(parents=True, exist_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return [shlex.join(["mount", "--bind", "-o", "ro", str(source), str(path)])]


class Container:
    """A running container: process 1 of its own process, mount and network namespaces."""

    def __init__(self, image: Image, process: subprocess.Popen[str]) -> None:
        self._image, self.process = image, process

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as its user."""
        entered = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid"]
        inside = [*entered, *confined(self._image, command)]
        return subprocess.run(inside, capture_output=True, text=True, timeout=300, check=False)

    @property
    def pid(self) -> int:
        """The id, outside of the container, of its process 1."""
        parent = self.process.pid
        (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return int(child)


def confined(image: Image, command: Sequence[str]) -> list[str]:
    """Return a command in an image's root, as its user, without privileges."""
    user, _, group = image.user.partition(":")
    setpriv = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"]
    setpriv += ["--bounding-set=-all", "--inh-caps=-all"]
    environ = [f"{name}={text}" for name, text in image.environ.items()]
    moved = ["env", "-i", *environ, f"--chdir={image.folder}"]
    return ["chroot", str(image.root), *setpriv, *moved, *command]


@contextmanager
def started(
    image: Image, command: Sequence[str] = (), volumes: Mapping[str, Path] | None = None
) -> Iterator[Container]:
    """Run a container with a read-only root, a /tmp in memory, volumes, and a loopback interface.

    `volumes`: folders of this machine by their place in the container.
    """
    root = shlex.quote(str(image.root))
    lines = ["ip link set lo up", f"mount --bind {root} {root}", f"mount -o remount,bind,ro {root}"]
    lines += [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]
    lines += [f"mount -t tmpfs -o nosuid,nodev,noexec,mode=1777 tmp {root}/tmp"]
    for target, source in (volumes or {}).items():
        lines += [f"mount --bind {shlex.quote(str(source))} {root}{target}"]
    inside = confined(image, [*image.entrypoint, *(command or image.command)])
    script = "\n".join([*lines, f"exec {shlex.join(inside)}"])
    unshared = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
    with subprocess.Popen(
        [*unshared, "sh", "-ec", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Container(image, process)
        finally:
            process.kill()
