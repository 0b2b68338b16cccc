"""AudioGenerationConfig and ServerConfig: fields, flags, layers, streaming options, readers."""

from __future__ import annotations

import argparse
import json
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from decoder import (
    AttentionKind,
    CodecSpec,
    DecoderConfigError,
    MaskPolicy,
    PrependPromptSpeechTokens,
    StreamingOptions,
    validate_streaming,
)
from llm import ConfigError, ModelConfig, PipelineConfig
from tts.config.flags import add_config_flags
from tts.config.pipeline import (
    AudioGenerationConfig,
    PrometheusMetricsMode,
    config_from_args,
    describe_error,
    load_config,
    streaming_options,
)
from tts.config.server import ServerConfig
from tts.config.sources import walk_fields

ROOT = Path(__file__).parents[3]
DEFAULTS = {
    "audio_decoder_weights": "",
    "chunk_size": None,
    "buffer": 0,
    "block_causal": False,
    "prepend_prompt_speech_tokens": PrependPromptSpeechTokens.NEVER,
    "prepend_prompt_speech_tokens_causal": False,
    "run_model_test_mode": False,
    "prometheus_metrics_mode": PrometheusMetricsMode.INSTRUMENT_ONLY,
    "audio_decoder_config": {},
}


def audio(**values: Any) -> AudioGenerationConfig:
    return AudioGenerationConfig(**{"audio_decoder": "embedded"} | values)


def from_line(line: str, environ: dict[str, str] | None = None) -> AudioGenerationConfig:
    """Return the configuration of a command line."""
    parser = argparse.ArgumentParser()
    add_config_flags(parser, AudioGenerationConfig, ServerConfig)
    args = parser.parse_args(["--audio-decoder", "embedded", *line.split()])
    return config_from_args(AudioGenerationConfig, args, environ=environ or {})


def test_the_audio_fields_and_their_defaults() -> None:
    config = audio()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    own = AudioGenerationConfig.model_fields.keys() - PipelineConfig.model_fields.keys()
    assert own == {
        *DEFAULTS,
        "audio_decoder",
        "family",
        "lexicon",
        "offline",
        "pace_streams",
        "watermark",
    }


def test_audio_fields_may_be_positional() -> None:
    config = AudioGenerationConfig("embedded", "", [4, 8], 2, True, max_length=9)
    assert (config.chunk_size, config.buffer, config.block_causal) == ([4, 8], 2, True)
    assert config.max_length == 9
    with pytest.raises(TypeError, match="audio_decoder"):
        AudioGenerationConfig("embedded", audio_decoder="embedded")
    with pytest.raises(TypeError, match="at most 9"):
        AudioGenerationConfig(*"0123456789")


def test_the_model_field_is_not_pydantics_model_config() -> None:
    assert isinstance(AudioGenerationConfig.model_config, dict)
    assert isinstance(audio().model, ModelConfig)
    assert "model_config" not in audio().model_dump()


def test_pickling() -> None:
    config = audio(chunk_size=[1, 2], max_length=7)
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.is_resolved


@pytest.mark.parametrize(
    ("given", "sizes"), [(5, [5]), ([2, 3], [2, 3]), ("8,16", [8, 16]), ("6", [6]), (None, None)]
)
def test_chunk_size_forms(given: Any, sizes: list[int] | None) -> None:
    assert audio(chunk_size=given).chunk_size == sizes


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"chunk_size": []}, "chunk_size"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"chunk_size": [4, -1]}, "chunk_size"),
        ({"chunk_size": [2.5]}, "chunk_size"),
        ({"chunk_size": True}, "chunk_size"),
        ({"chunk_size": "8,,9"}, "chunk_size"),
        ({"buffer": -1}, "buffer"),
        ({"audio_decoder": ""}, "audio_decoder"),
        ({"prepend_prompt_speech_tokens": "twice"}, "prepend_prompt_speech_tokens"),
        ({"prometheus_metrics_mode": "loud"}, "prometheus_metrics_mode"),
    ],
)
def test_a_wrong_audio_value_names_its_field(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named) as caught:
        audio(**values)
    assert describe_error(caught.value).startswith(named)


def test_the_decoder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="audio_decoder"):
        AudioGenerationConfig()
    with pytest.raises(ConfigError, match=r"audio_decoder=nothing is neither .* embedded"):
        audio(audio_decoder="nothing")
    assert audio(audio_decoder=str(tmp_path)).is_resolved
    with pytest.raises(ConfigError, match="audio_decoder_weights=/no/file is not a file"):
        audio(audio_decoder_weights="/no/file")


def test_features_that_the_core_refuses_are_refused_by_the_service() -> None:
    with pytest.raises(ConfigError, match="ep_size=2 must be 1 or the number of devices"):
        audio(ep_size=2)


def test_from_flags_reads_texts() -> None:
    config = AudioGenerationConfig.from_flags(
        {
            "audio_decoder": "embedded",
            "chunk_size": "8,16",
            "buffer": "4",
            "block_causal": "TRUE",
            "prepend_prompt_speech_tokens": "rolling",
            "prepend_prompt_speech_tokens_causal": "false",
            "run_model_test_mode": "False",
            "prometheus_metrics_mode": "launch_server",
        },
        max_length=100,
    )
    assert (config.chunk_size, config.buffer, config.block_causal) == ([8, 16], 4, True)
    assert config.prepend_prompt_speech_tokens is PrependPromptSpeechTokens.ROLLING
    assert not config.prepend_prompt_speech_tokens_causal
    assert not config.run_model_test_mode
    assert (config.prometheus_metrics_mode, config.max_length) == ("launch_server", 100)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "audio_decoder is required"),
        ({"audio_decoder": ""}, "audio_decoder is required"),
        ({"block_causal": "yes"}, "block_causal=yes"),
        ({"buffer": "four"}, "buffer=four"),
        ({"chunk_size": "a,b"}, "chunk_size"),
        ({"prepend_prompt_speech_tokens": "x"}, "prepend_prompt_speech_tokens"),
        ({"zzz": "1", "aaa": "2"}, "aaa, zzz"),
    ],
)
def test_errors_of_from_flags_name_the_field(flags: dict[str, str], message: str) -> None:
    needed = {} if "audio_decoder" in flags or not flags else {"audio_decoder": "embedded"}
    with pytest.raises(ValueError, match=message):
        AudioGenerationConfig.from_flags(needed | flags)


@pytest.mark.parametrize("block_causal", [False, True])
@pytest.mark.parametrize("prompt_causal", [False, True])
def test_causal_means_not_seeing_the_current_block(block_causal: bool, prompt_causal: bool) -> None:
    config = audio(block_causal=block_causal, prepend_prompt_speech_tokens_causal=prompt_causal)
    assert streaming_options(config).masks == MaskPolicy(block_causal, prompt_causal)


def test_streaming_options_of_the_configuration() -> None:
    config = audio(chunk_size="2,4", buffer=3, prepend_prompt_speech_tokens="once")
    assert streaming_options(config) == StreamingOptions(
        chunk_sizes=(2, 4), buffer=3, prepend=PrependPromptSpeechTokens.ONCE
    )
    assert streaming_options(audio()) == StreamingOptions()


def test_unset_streaming_fields_follow_the_codec() -> None:
    codec = StreamingOptions((6, 12), 25, MaskPolicy(block_causal=True))
    assert streaming_options(audio(), codec) == codec
    assert streaming_options(audio(chunk_size=None), codec).chunk_sizes is None
    mixed = streaming_options(audio(buffer=0, block_causal=False), codec)
    assert mixed == StreamingOptions((6, 12), 0, MaskPolicy())


def test_flags_reach_every_kind_of_field() -> None:
    config = from_line(
        "--chunk-size 8,16 --block-causal --no-enable-chunked-prefill --max-length 70 "
        "--model.kv-cache.num-pages 40 --model.device-specs cpu --kvcache-ce-watermark 0.5 "
        '--audio-decoder-config {"max_batch":4} --max-batch-size none '
        "--model.quantization-encoding int8"
    )
    assert (config.chunk_size, config.block_causal) == ([8, 16], True)
    assert (config.enable_chunked_prefill, config.max_length) == (False, 70)
    assert (config.model.kv_cache.num_pages, config.model.device_specs) == (40, ["cpu"])
    assert (config.kvcache_ce_watermark, config.audio_decoder_config) == (0.5, {"max_batch": 4})
    assert (config.max_batch_size, config.model.quantization_encoding) == (None, "int8")


def test_a_flag_of_a_list_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.pls", "b.txt", "c.txt", "d,e.txt"):
        (tmp_path / name).touch()
    config = from_line('--lexicon a.pls --lexicon b.txt,c.txt --lexicon ["d,e.txt"]')
    assert config.lexicon == ["a.pls", "b.txt", "c.txt", "d,e.txt"]
    assert audio(lexicon=Path("a.pls")).lexicon == ["a.pls"]
    assert from_line("--chunk-size none --chunk-size 8").chunk_size == [8]
    assert from_line("--chunk-size none").chunk_size is None


def test_flags_that_were_not_given_leave_fields_unset() -> None:
    assert "buffer" not in from_line("").model_fields_set
    assert "buffer" in from_line("--buffer 0").model_fields_set


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--buffer x", "buffer"),
        ("--audio-decoder-config {", "audio_decoder_config={ is not JSON"),
        ("--lora []", "lora"),
        ("--lora {", "lora={ is not JSON"),
        ("--audio-decoder none", "audio_decoder=none is neither"),
        ("--ep-size 2", "ep_size=2 must be 1 or the number of devices"),
    ],
)
def test_bad_flags(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_line(line)


def test_flags_of_both_classes_share_one_parser() -> None:
    names = [name for name, _ in walk_fields(AudioGenerationConfig)]
    assert not set(names) & {name for name, _ in walk_fields(ServerConfig)}


@pytest.fixture
def layered_file(tmp_path: Path) -> str:
    path = tmp_path / "sonant.json"
    values = {"buffer": 4, "max_length": 50, "model": {"kv_cache": {"num_pages": 20}}}
    path.write_text(
        json.dumps({"audio_generation_config": values, "server_config": {"port": 1111}})
    )
    return str(path)


def test_flag_over_file_over_environment_over_base_over_default(layered_file: str) -> None:
    environ = {
        "SONANT_BUFFER": "9",
        "SONANT_MAX_LENGTH": "60",
        "SONANT_MAX_BATCH_SIZE": "6",
        "SONANT_MODEL__KV_CACHE__KV_CACHE_PAGE_SIZE": "16",
        "SONANT_ENABLE_CHUNKED_PREFILL": "false",
        "OTHER": "ignored",
    }
    config = load_config(
        AudioGenerationConfig,
        {"buffer": "2", "config_file": layered_file},
        environ=environ,
        base={"audio_decoder": "embedded", "max_batch_size": 3, "enable_in_flight_batching": True},
    )
    cache = config.model.kv_cache
    assert (config.buffer, config.max_length, config.max_batch_size) == (2, 50, 6)
    assert (cache.num_pages, cache.kv_cache_page_size) == (20, 16)
    assert (config.enable_in_flight_batching, config.enable_chunked_prefill) == (True, False)


def test_the_environment_can_name_the_file(layered_file: str) -> None:
    config = from_line("", {"SONANT_CONFIG_FILE": layered_file, "SONANT_BUFFER": "9"})
    assert (config.buffer, config.config_file) == (4, layered_file)


def test_the_server_reads_its_own_section(layered_file: str, tmp_path: Path) -> None:
    args = argparse.Namespace(config_file=layered_file)
    server = config_from_args(ServerConfig, args, environ={"SONANT_HOST": "::1"})
    assert (server.port, server.host) == (1111, "::1")
    args = argparse.Namespace(config_file=layered_file, port="2")
    assert config_from_args(ServerConfig, args, environ={}).port == 2
    (tmp_path / "flat.toml").write_text("buffer = 3\n")
    args = argparse.Namespace(config_file=str(tmp_path / "flat.toml"))
    assert config_from_args(ServerConfig, args, environ={}).port == 50051


def test_an_unknown_variable_is_an_error() -> None:
    with pytest.raises(ConfigError, match="SONANT_BUFER'; did you mean 'SONANT_BUFFER'"):
        load_config(ServerConfig, {}, environ={"SONANT_BUFER": "1"})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONANT_PORT", "4321")
    assert load_config(ServerConfig, {}).port == 4321


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 70000}, "port"),
        ({"max_queued_requests": -1}, "max_queued_requests"),
        ({"min_prompt_duration_s": 31}, "min_prompt_duration_s must not exceed"),
        ({"tls_cert": "a.pem"}, "tls_cert and tls_key go together"),
        ({"tls_client_ca": "a.pem"}, "tls_client_ca needs tls_cert"),
        ({"auth_token": ""}, "must be printable ASCII"),
        ({"auth_token": "  "}, "must be printable ASCII"),
        ({"admin_token": ""}, "must be printable ASCII"),
        ({"auth_token": " padded"}, "must be printable ASCII"),
        ({"auth_token": "Schlüssel"}, "must be printable ASCII"),
        ({"prot": 1}, "did you mean 'port'"),
        ({"wyoming_port": 70_000}, "wyoming_port"),
        ({"wyoming_host": "", "wyoming_port": 0}, "wyoming_host"),
    ],
)
def test_server_values_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ServerConfig(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"auth_token": "x"},
        {"admin_token": "x"},
        {"tls_cert": "a.pem", "tls_key": "a.key", "tls_client_ca": "ca.pem"},
    ],
)
def test_wyoming_has_no_tokens(values: dict[str, Any]) -> None:
    """A server that checks its clients serves Wyoming on the loopback interface, or when told."""
    outside = {"wyoming_port": 10200, "wyoming_host": "0.0.0.0", **values}
    with pytest.raises(ValidationError, match="wyoming_without_token"):
        ServerConfig(**outside)
    ServerConfig(**outside, wyoming_without_token=True)
    ServerConfig(**{**outside, "wyoming_host": "127.0.0.1"})
    ServerConfig(**{**outside, "wyoming_port": None})


def test_wyoming_listens_anywhere_on_a_server_without_tokens() -> None:
    assert ServerConfig(wyoming_port=10200, wyoming_host="0.0.0.0").wyoming_host == "0.0.0.0"


def test_the_server_configuration_is_frozen_and_hides_its_tokens() -> None:
    server = ServerConfig(auth_token="secret-1", admin_token="secret-2")
    assert "secret" not in repr(server)
    with pytest.raises(ConfigError, match="port cannot change"):
        server.port = 1


def test_masks_that_a_codec_cannot_apply_are_refused_downstream() -> None:
    """The decoder package validates the options of the configuration."""
    spec = CodecSpec("plain", 16000, Fraction(320), 8, attention=AttentionKind.NONE)
    with pytest.raises(DecoderConfigError, match="cannot apply attention masks"):
        validate_streaming(streaming_options(audio(block_causal=True, buffer=1)), spec)
