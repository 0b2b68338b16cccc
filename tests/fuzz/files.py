"""Damaged configuration files, voice files and checkpoints for the functions that read them."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import yaml

from llm import ConfigError, StrictModel
from llm.models.gguf import GGUFFile, GGUFWeights
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama import LlamaModel
from tests.fakes import build_tiny_checkpoint, tiny_config
from tests.fuzz.base import Case, InvariantError, Target
from tests.fuzz.mutation import changed_json, json_text, mutated
from tests.llm.gguf_files import write_gguf
from tests.tts.serving import hum, wav
from tts.checkpoint.gguf import tokenizer_of
from tts.config.pipeline import AudioGenerationConfig, ServerConfig, load_config
from tts.config.serve import WRONG_CONFIGURATION
from tts.factory import connect_service, create_engine_client, open_checkpoint
from tts.text.lexicon.entries import Pronunciation
from tts.text.lexicon.files import check_lexicon
from tts.voices.registry import VoiceRegistry
from tts.voices.types import Voice, VoicePrompt

SETTINGS: dict[str, Any] = {
    "server_config": {"port": 0, "log_format": "json", "idle_timeout_s": 5.5, "auth_token": "x"},
    "audio_generation_config": {
        "audio_decoder": "auto",
        "chunk_size": [2, 4],
        "max_batch_size": 4,
        "model": {"model_path": "x", "device_specs": ["cpu"], "kv_cache": {"num_pages": 8}},
        "sampling": {"enable_structured_output": True},
        "lora": {"enable_lora": True, "lora_paths": ["a=b"]},
    },
}
TOML = b"""[server_config]
port = 0
idle_timeout_s = 5.5
[audio_generation_config]
chunk_size = [2, 4]
model = {model_path = "x", device_specs = ["cpu"]}
"""
LEXICONS = (
    b"""<lexicon xmlns="http://www.w3.org/2005/01/pronunciation-lexicon" xml:lang="en">
<lexeme><grapheme>SQL</grapheme><alias>sequel</alias></lexeme>
<lexeme><grapheme>New York</grapheme><phoneme prefer="true">nu</phoneme></lexeme>
</lexicon>""",
    b";;; words\nTOMATO  T AH0 M EY1 T OW2\nTOMATO(2)  T AH0 M AA1 T OW2 # British\n",
    "SQL\tsequel\nNguyễn\t/wɪn/\nGIF\tJH IH1 F\n# a comment\n".encode(),
)
CLASSES: tuple[type[StrictModel], ...] = (ServerConfig, AudioGenerationConfig)
PARTS = ("codec", "chat template", "tensor", "voice", "family", "memory")  # these also name a file
HEADER_BYTES = 400  # of weights, which begin with a table


class _Checkpoints:
    """A tiny checkpoint of which one file at a time is damaged."""

    def __init__(self, folder: Path) -> None:
        self._folder = build_tiny_checkpoint(folder)
        self._add_files()
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        self._whole = {path: path.read_bytes() for path in paths}

    def try_one(self, chance: Random) -> None:
        path = chance.choice(tuple(self._whole))
        try:
            path.write_bytes(self._damaged(path, chance))
            self._load()
        except WRONG_CONFIGURATION as error:
            names = (*(known.name for known in self._whole), *PARTS, self._folder.name)
            if not any(name in str(error) for name in names):
                raise InvariantError(
                    f"no file in the message about {path.name}: {error}"
                ) from error
        finally:
            path.write_bytes(self._whole[path])

    def _add_files(self) -> None:
        """Add optional files of a checkpoint: a voice with codes and one with a recording."""
        (self._folder / "hum.wav").write_bytes(wav(hum(1.2)))
        path = self._folder / "voices.json"
        values = json.loads(path.read_text())
        values["voices"] += [
            {"name": "coded", "codes": [1, 2, 3], "transcript": "one", "language_codes": ["de"]},
            {"name": "heard", "audio": "hum.wav", "transcript": "hum"},
        ]
        path.write_text(json.dumps(values))

    def _damaged(self, path: Path, chance: Random) -> bytes:
        whole = self._whole[path]
        if path.suffix == ".safetensors":
            return mutated(whole[:HEADER_BYTES], chance) + whole[HEADER_BYTES:]
        if path.suffix != ".json" or chance.random() < 0.2:
            return mutated(whole, chance)
        return json_text(changed_json(json.loads(whole), chance), chance).encode("utf-8", "replace")

    def _load(self) -> None:
        config = tiny_config(self._folder)
        config.resolve()
        checkpoint = open_checkpoint(config)
        client, facts = create_engine_client(config, None, checkpoint)
        try:
            service = connect_service(config, None, client, facts, checkpoint=checkpoint)
            service.prompts.check_chat()
        finally:
            asyncio.run(client.close())


class _Voices:
    """A folder of created voices in which files are damaged; errors are logged, not raised."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "voices"
        registry = VoiceRegistry((), "", folder=self._folder)
        prompt, said = VoicePrompt((1, 2), "one two"), (Pronunciation("SQL", "sequel"),)
        registry.create(Voice("good", "Good", ("en",), prompt=prompt, pronunciations=said))
        self._whole = (self._folder / "good.json").read_bytes()

    def try_one(self, chance: Random) -> None:
        values = changed_json(json.loads(self._whole), chance)
        data = json_text(values, chance).encode("utf-8", "replace")
        data = mutated(self._whole, chance) if chance.random() < 0.3 else data
        (self._folder / "bad.json").write_bytes(data.replace(b'"good"', b'"bad"'))
        registry = VoiceRegistry((), "", folder=self._folder)
        registry.get("good").num_bytes  # noqa: B018 - it encodes the texts
        for voice in registry.voices("en"):
            voice.speaks("en-US")


class _Lexicons:
    """Files of pronunciations: read, or refused with the name of the file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "words.txt"

    def try_one(self, chance: Random) -> None:
        self._path.write_bytes(mutated(chance.choice(LEXICONS), chance))
        try:
            check_lexicon(self._path)
        except ConfigError as error:
            if not str(error).startswith(f"{self._path}:"):
                raise InvariantError(f"no file in the message: {error}") from error


class _GGUFFiles:
    """A GGUF file whose header is damaged: read whole, or refused."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "whole.gguf"
        form, kind = gguf.GGMLQuantizationType, "tokenizer.ggml"
        tensors = {
            "token_embd.weight": (np.zeros((3, 64), np.float32), form.F32),
            "rope_freqs.weight": (np.ones(8, np.float32), form.F32),
            "blk.0.attn_q.weight": (np.zeros((64, 34), np.uint8), form.Q8_0),
        }
        keys = {f"{kind}.model": "gpt2", f"{kind}.tokens": ["a", "b", "ab"]}
        keys |= {f"{kind}.merges": ["a b"], f"{kind}.token_type": [1, 1, 3]}
        self._whole = write_gguf(
            self._path, tensors, keys | {f"{kind}.eos_token_id": 2}
        ).read_bytes()
        self._header = len(self._whole) - sum(data.nbytes for data, _ in tensors.values())

    def try_one(self, chance: Random) -> None:
        head, data = self._whole[: self._header], self._whole[self._header :]
        self._path.write_bytes(mutated(head, chance) + data)
        try:
            file = GGUFFile.read(self._path)
            LlamaModel.read_config(HuggingFaceConfig(self._path, file.config()))
            tokenizer_of(file)
            weights = GGUFWeights(self._path)
            for name in weights.info():
                weights.tensor(name)
        except WRONG_CONFIGURATION:
            return


class _Configurations:
    """A configuration file in each of its formats."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def try_one(self, chance: Random) -> None:
        suffix = chance.choice((".json", ".yaml", ".toml"))
        path = self._folder / f"config{suffix}"
        path.write_bytes(_settings(suffix, chance))
        sections: Sequence[dict[str, Any]] = ({}, {}, {"section_name": "server_config"})
        try:
            flags = {**chance.choice(sections), "config_file": str(path)}
            load_config(chance.choice(CLASSES), flags, environ={})
        except WRONG_CONFIGURATION:
            return


def _settings(suffix: str, chance: Random) -> bytes:
    if suffix == ".toml":
        return mutated(TOML, chance)
    changed = changed_json(SETTINGS, chance)
    text = json_text(changed, chance)
    if suffix == ".yaml" and chance.random() < 0.8:
        text = yaml.safe_dump(changed, allow_unicode=True)
    data = text.encode("utf-8", "replace")
    return mutated(data, chance) if chance.random() < 0.3 else data


@contextmanager
def _opened(folder: Path) -> Iterator[Case]:
    shutil.rmtree(folder / "tiny", ignore_errors=True)
    parts = (
        _Checkpoints(folder / "tiny"),
        _Voices(folder),
        _GGUFFiles(folder),
        _Configurations(folder),
        _Lexicons(folder),
    )
    logging.disable(logging.WARNING)  # each damaged file is logged
    try:
        yield lambda chance: chance.choice(parts).try_one(chance)
    finally:
        logging.disable(logging.NOTSET)


FILES = Target("files", _opened)
