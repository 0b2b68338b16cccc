"""`ServerConfig`: addresses, access, limits, timeouts, logs and metrics of the front ends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from llm import StrictModel
from tts.engine.admission import AdmissionLimits

MIB = 2**20
LOOPBACK = ("127.0.0.1", "::1", "localhost")
TOKEN = re.compile("[!-~]([ -~]*[!-~])?")
ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
CPU, DEVICE = "cpu", re.compile(r"cpu|cuda:[0-9]+")
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


class ServerConfig(StrictModel):
    """Configuration of the front ends. Frozen from the start."""

    SECTION: ClassVar[str] = "server_config"

    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(default=50051, ge=0, le=65535, description="port; 0 is any free one")
    http_port: int | None = Field(
        default=None, ge=0, le=65535, description="port for HTTP, which is off without it"
    )
    http_cors_origins: list[str] = Field(
        default_factory=list, description="origins of web pages that may call over HTTP"
    )
    wyoming_port: int | None = Field(
        default=None, ge=0, le=65535, description="port for Wyoming, which is off without it"
    )
    wyoming_host: str = Field(
        default="127.0.0.1", min_length=1, description="address for Wyoming, for Home Assistant"
    )
    wyoming_without_token: bool = Field(
        default=False, description="serve Wyoming on any address although others need a token"
    )
    text_model: str | None = Field(
        default=None,
        min_length=1,
        description="second model, which answers requests for text: folder or hub OWNER/NAME",
    )
    text_model_config: dict[str, Any] = Field(
        default_factory=dict, description="configuration of the text model, as of the model"
    )
    speech_server: str | None = Field(
        default=None,
        description="another server, HOST:PORT of gRPC, that speaks what this text model generates",
    )
    speech_server_token: str | None = Field(
        default=None, repr=False, description="token that the speech server asks for"
    )
    speech_server_tls: bool = Field(
        default=False, description="encrypt the connection to the speech server"
    )
    speech_server_ca: Path | None = Field(
        default=None, description="CA to trust for the speech server, PEM; implies TLS"
    )
    front_ends: int = Field(
        default=1, ge=0, le=64, description="processes for calls; 0: the engine's"
    )
    prefill_devices: list[str] = Field(
        default_factory=list,
        description="devices of engines that only compute prompts, one each, for the others",
    )
    max_restarts: int = Field(
        default=5, ge=0, description="restarts in a row of a process that died"
    )
    unload_after_s: float | None = Field(
        default=None,
        ge=1,
        description="idle time after which a model is unloaded until the next call (default: "
        "never)",
    )
    step_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="longest step; a slower engine is restarted",
    )
    load_timeout_s: float = Field(
        default=1800.0,
        gt=0,
        description="longest start of a restarted process; a slower one is restarted again",
    )
    max_concurrent_requests: int = Field(default=32, gt=0, description="calls running at once")
    max_queued_requests: int = Field(default=16, ge=0, description="calls waiting to run")
    max_streams_per_client: int = Field(default=64, gt=0, description="open calls of one client")
    max_text_characters: int = Field(
        default=10_000, gt=0, description="longest text of one request"
    )
    max_fragment_characters: int = Field(
        default=2_000, gt=0, description="longest fragment of streamed text"
    )
    max_stream_characters: int = Field(
        default=100_000, gt=0, description="longest streamed text in total"
    )
    max_prompt_audio_bytes: int = Field(default=10 * MIB, gt=0, description="largest voice prompt")
    min_prompt_duration_s: float = Field(default=1.0, gt=0, description="shortest voice prompt")
    max_prompt_duration_s: float = Field(default=30.0, gt=0, description="longest voice prompt")
    max_audio_duration_s: float = Field(
        default=600.0, gt=0, description="longest audio of one call"
    )
    max_connection_age_s: float | None = Field(
        default=None,
        ge=0.1,
        le=1e6,
        description="age of a connection after which its client reconnects",
    )
    max_message_bytes: int = Field(default=16 * MIB, ge=4096, description="largest message or body")
    max_voices: int = Field(default=256, ge=0, description="voices that clients may create")
    max_voice_bytes: int = Field(
        default=16 * MIB, ge=0, description="largest size of created voices in total"
    )
    voice_folder: Path | None = Field(default=None, description="folder that keeps created voices")
    drain_delay_s: float = Field(
        default=0.0, ge=0, description="time as NOT_SERVING before calls are refused"
    )
    drain_grace_s: float = Field(
        default=30.0, ge=0, description="time to finish calls after SIGTERM"
    )
    slow_reader_timeout_s: float = Field(
        default=10.0, gt=0, description="how long a client may leave audio unread"
    )
    receive_timeout_s: float = Field(
        default=10.0, gt=0, description="longest arrival of a unary request"
    )
    idle_timeout_s: float = Field(default=60.0, gt=0, description="longest pause of a text stream")
    auth_token: str | None = Field(
        default=None, repr=False, description="token that every call must send"
    )
    admin_token: str | None = Field(
        default=None, repr=False, description="token for creating and deleting voices"
    )
    tls_cert: Path | None = Field(default=None, description="server certificate chain, PEM")
    tls_key: Path | None = Field(default=None, description="server private key, PEM")
    tls_client_ca: Path | None = Field(
        default=None, description="CA of client certificates; requires them"
    )
    enable_reflection: bool = Field(default=True, description="serve gRPC reflection")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="debug, info, warning or error"
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="log lines as text, or as JSON objects: json"
    )
    log_user_text: bool = Field(default=False, description="log the texts that clients send")
    trace_requests: bool = Field(
        default=False, description="write an OpenTelemetry trace of each call"
    )
    metrics_host: str = Field(default="127.0.0.1", description="address of the metrics server")
    metrics_port: int = Field(
        default=8001, ge=0, le=65535, description="port of the metrics server; 0 is any free one"
    )

    @field_validator("auth_token", "admin_token", "speech_server_token")
    @classmethod
    def _is_token(cls, token: str | None) -> str | None:
        """Refuse a token that leaves the server open, or that no client can send."""
        if token is not None and not TOKEN.fullmatch(token):
            raise ValueError(
                "must be printable ASCII, at least one character, without spaces at its ends; "
                "leave it out for a server without it"
            )
        return token

    @field_validator("speech_server")
    @classmethod
    def _is_address(cls, address: str | None) -> str | None:
        if address is None:
            return None
        match = ADDRESS.fullmatch(address)
        if match is None or not 1 <= int(match["port"]) <= 65535:
            raise ValueError(f"{address!r} is no address; write HOST:PORT")
        return address

    @field_validator("prefill_devices")
    @classmethod
    def _are_devices(cls, devices: list[str]) -> list[str]:
        wrong = [device for device in devices if not DEVICE.fullmatch(device)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no device; write cpu or cuda:0")
        gpus = [device for device in devices if device != CPU]
        if len(set(gpus)) < len(gpus):
            raise ValueError(f"{','.join(devices)} must name different GPUs")
        return devices

    @field_validator("http_cors_origins")
    @classmethod
    def _are_origins(cls, origins: list[str]) -> list[str]:
        wrong = [origin for origin in origins if not ORIGIN.fullmatch(origin)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no origin; write https://example.org, or * for all")
        return origins

    @model_validator(mode="after")
    def _fits_together(self) -> ServerConfig:
        if self.min_prompt_duration_s > self.max_prompt_duration_s:
            raise ValueError("min_prompt_duration_s must not exceed max_prompt_duration_s")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        if self.unload_after_s is not None and not self.front_ends:
            raise ValueError("unload_after_s needs front_ends of at least 1")
        if self.prefill_devices and not self.front_ends:
            raise ValueError("prefill_devices needs front_ends of at least 1")
        if self.text_model_config and self.text_model is None:
            raise ValueError("text_model_config needs text_model")
        if self.speech_server is None and self._names_speech_server:
            raise ValueError("speech_server_token, _tls and _ca need speech_server")
        if self.speech_server is not None and self.text_model is not None:
            raise ValueError("speech_server and text_model exclude each other; name one of them")
        if self.wyoming_port is not None and not self._may_speak_wyoming:
            raise ValueError(
                "Wyoming has no tokens and no TLS, which this server requires: set wyoming_host to "
                "127.0.0.1, or wyoming_without_token to serve every client that reaches its port"
            )
        return self

    @property
    def admission_limits(self) -> AdmissionLimits:
        """Limits on concurrent calls, counted over all front ends."""
        return AdmissionLimits(
            max_running=self.max_concurrent_requests,
            max_waiting=self.max_queued_requests,
            max_per_client=self.max_streams_per_client,
        )

    @property
    def _names_speech_server(self) -> bool:
        given = self.speech_server_token, self.speech_server_ca
        return self.speech_server_tls or any(value is not None for value in given)

    @property
    def _may_speak_wyoming(self) -> bool:
        is_protected = any((self.auth_token, self.admin_token, self.tls_client_ca))
        is_local = self.wyoming_host in LOOPBACK
        return is_local or self.wyoming_without_token or not is_protected

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self.freeze()
