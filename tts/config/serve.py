"""`ServeConfig`: configuration of models and server together, and the report of a wrong one."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from pydantic import ValidationError

from decoder import DecoderConfigError
from llm import CapacityError, CheckpointError, ConfigError
from tts.config.defaults import complete_values
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
    """Configuration of the model and of the server, and of a second model for text if any."""

    model: AudioGenerationConfig
    server: ServerConfig
    text: AudioGenerationConfig | None = None

    @classmethod
    def of(cls, model: AudioGenerationConfig, server: ServerConfig) -> ServeConfig:
        """Return the configuration with that of the server's text model, if it names one.

        A model of the hub is downloaded first, unless it is cached. Raises ConfigError and
        CheckpointError.
        """
        if server.text_model is None:
            return cls(model, server)
        named = {"model": {"model_path": server.text_model}}
        given = AudioGenerationConfig.merged(
            {"offline": model.offline}, server.text_model_config, named
        )
        try:
            return cls(model, server, AudioGenerationConfig(**complete_values(given)))
        except ValidationError as error:
            raise ConfigError(f"text_model_config: {describe_error(error)}") from error

    @property
    def num_replicas(self) -> int:
        """Number of engines of the model."""
        return self.model.model.data_parallel_degree

    def of_replica(self, number: int, zmq_endpoint_base: str) -> ServeConfig:
        """Return the configuration of one replica's engine, by its number from 0."""
        own = {"zmq_endpoint_base": zmq_endpoint_base}
        return replace(self, model=self.model.of_replica(number).model_copy(update=own))


def refuse(error: Exception) -> int:
    """Print in one line what is wrong with the configuration, and return the exit status."""
    message = describe_error(error) if isinstance(error, ValidationError) else str(error)
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return 2
