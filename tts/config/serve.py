"""`ServeConfig`: configuration of models and server together, and the report of a wrong one."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from decoder import DecoderConfigError
from llm import CapacityError, CheckpointError, ConfigError, PipelineRole
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
        """Number of engines of the model, without those that only compute prompts for them."""
        return self.model.model.data_parallel_degree

    @property
    def num_engines(self) -> int:
        """Number of all engines of the model on this machine."""
        return self.num_replicas + len(self.server.prefill_devices)

    def of_replica(
        self, number: int, zmq_endpoint_base: str, prefills: tuple[str, ...] = ()
    ) -> ServeConfig:
        """Return the configuration of one replica's engine, by its number from 0.

        `prefills`: bases of the server's engines that compute prompts, if there are any.
        """
        own: dict[str, Any] = {"zmq_endpoint_base": zmq_endpoint_base}
        if prefills:
            own |= {"pipeline_role": PipelineRole.DecodeOnly, "prefill_endpoints": [*prefills]}
        return self._of_engine(number, own)

    def of_prefill(self, number: int, zmq_endpoint_base: str) -> ServeConfig:
        """Return the configuration of an engine that computes prompts, by its number from 0."""
        role = PipelineRole.PrefillOnly
        own: dict[str, Any] = {"zmq_endpoint_base": zmq_endpoint_base, "pipeline_role": role}
        return self._of_engine(0, own, [self.server.prefill_devices[number]])

    def _of_engine(
        self, number: int, own: dict[str, Any], devices: list[str] | None = None
    ) -> ServeConfig:
        """Return the configuration of an engine, on devices of its own or a replica's."""
        config, cache = self.model.of_replica(number), self.model.model.kv_cache
        section = config.model
        if devices is not None:
            section = section.model_copy(update={"device_specs": devices, "kv_cache": cache})
        if section.on_cpu:  # all engines share its memory
            share = cache.device_memory_utilization / self.num_engines
            cache = cache.model_copy(update={"device_memory_utilization": share})
            section = section.model_copy(update={"kv_cache": cache})
        return replace(self, model=config.model_copy(update={**own, "model": section}))


def refuse(error: Exception) -> int:
    """Print in one line what is wrong with the configuration, and return the exit status."""
    message = describe_error(error) if isinstance(error, ValidationError) else str(error)
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return 2
