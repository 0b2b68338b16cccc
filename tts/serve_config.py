"""Both halves of a server's configuration, and how a wrong one is told."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pydantic import ValidationError

from decoder import DecoderConfigError
from llm import CapacityError, CheckpointError, ConfigError
from tts.config import AudioGenerationConfig, ServerConfig, describe_error

PROGRAM = "serve"
WRONG_CONFIGURATION = (
    ConfigError,
    CheckpointError,
    CapacityError,
    DecoderConfigError,
    FileNotFoundError,
    ValidationError,
)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Both halves of the configuration."""

    model: AudioGenerationConfig
    server: ServerConfig


def refuse(error: Exception) -> int:
    """Say in one line what is wrong with the configuration; the exit status."""
    message = describe_error(error) if isinstance(error, ValidationError) else str(error)
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return 2
