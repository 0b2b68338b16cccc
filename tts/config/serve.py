"""`ServeConfig`: model and server configuration together, and the report of a wrong one."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pydantic import ValidationError

from decoder import DecoderConfigError
from llm import CapacityError, CheckpointError, ConfigError
from tts.config.pipeline import AudioGenerationConfig, describe_error
from tts.config.server import ServerConfig

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
    """Configuration of the model and of the server."""

    model: AudioGenerationConfig
    server: ServerConfig


def refuse(error: Exception) -> int:
    """Print in one line what is wrong with the configuration, and return the exit status."""
    message = describe_error(error) if isinstance(error, ValidationError) else str(error)
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return 2
