"""The composition root: what a folder and a configuration become."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from decoder import AudioEncoding, AudioFormat, DecoderConfigError, PrependPromptSpeechTokens
from llm import CheckpointError, Request, SamplingParams
from llm.models.llama import LlamaModel
from tests.fakes import build_tiny_checkpoint, tiny_config
from tests.vocabulary import END_OF_SPEECH, END_OF_TEXT
from tts.checkpoint.chat import ChatMessage, ChatRole
from tts.config.defaults import default_values, embedded_folder
from tts.config.pipeline import AudioGenerationConfig, load_config
from tts.config.server import ServerConfig
from tts.factory import Service, cpu_threads, create_service
from tts.speech.types import SamplingOverrides, SpeechRequest, Started


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    """Return a copy of the checkpoint that a test may change."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "spoiled"))


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def closed(service: Service) -> Service:
    asyncio.run(service.client.close())
    return service


def test_a_speech_checkpoint_creates_all_components(service: Service) -> None:
    assert (service.model, service.family) == ("tiny", "embedded")
    synthesizer = service.synthesizer
    assert synthesizer is not None
    assert service.codec is synthesizer.codec
    assert [voice.name for voice in synthesizer.voices.voices()] == ["hazel", "owen", "edith"]
    settings = synthesizer.settings
    assert settings.model == "tiny"
    assert (settings.traits.max_characters, settings.traits.max_codes) == (200, 500)
    assert settings.max_seq_len == 1024
    assert (settings.sampling.temperature, settings.sampling.top_k) == (0.8, 50)
    assert (settings.streaming.chunk_sizes, settings.streaming.buffer) == ((2, 4, 8), 8)
    assert settings.streaming.masks.block_causal
    assert service.text.stop_token_ids == (END_OF_SPEECH, END_OF_TEXT)
    assert service.prompts.can_chat


def test_configuration_overrides_the_defaults_of_the_codec(tiny_checkpoint: Path) -> None:
    config = tiny_config(
        tiny_checkpoint,
        chunk_size=[5],
        prepend_prompt_speech_tokens="rolling",
        max_length=300,
        model={"served_model_name": "renamed"},
    )
    service = closed(create_service(config))
    assert service.synthesizer is not None
    settings = service.synthesizer.settings
    assert settings.streaming.chunk_sizes == (5,)
    assert settings.streaming.buffer == 8  # not set by the configuration
    assert settings.streaming.prepend is PrependPromptSpeechTokens.ROLLING
    assert (service.model, settings.max_seq_len, service.text.max_seq_len) == ("renamed", 300, 300)


def test_server_limits_reach_the_components(tiny_checkpoint: Path) -> None:
    server = ServerConfig(max_audio_duration_s=5, max_prompt_audio_bytes=1000, max_voices=1)
    service = closed(create_service(tiny_config(tiny_checkpoint), server))
    assert service.synthesizer is not None
    settings = service.synthesizer.settings
    assert settings.max_audio_s == 5
    assert settings.cloning.audio.max_bytes == 1000


def test_the_raw_format_is_that_of_the_decoder(tiny_checkpoint: Path) -> None:
    config = tiny_config(tiny_checkpoint, audio_decoder_config={"pcm_format": "f32le"})
    service = create_service(config)

    async def scenario() -> list[AudioFormat]:
        assert service.synthesizer is not None
        short = SamplingOverrides(max_tokens=4)
        requests = [
            SpeechRequest("hi", sampling=short),
            SpeechRequest("hi", sampling=short, encoding=AudioEncoding.MULAW),
        ]
        formats = []
        for request in requests:
            events = [event async for event in service.synthesizer.stream(request)]
            assert isinstance(events[0], Started)
            formats.append(events[0].audio_format)
        await service.client.close()
        return formats

    encodings = [audio_format.encoding for audio_format in asyncio.run(scenario())]
    assert encodings == [AudioEncoding.PCM_F32LE, AudioEncoding.MULAW]


def test_a_text_checkpoint_has_no_synthesizer(text_checkpoint: Path) -> None:
    service = create_service(tiny_config(text_checkpoint))
    assert (service.family, service.codec, service.synthesizer) == ("", None, None)

    async def scenario() -> int:
        request = Request("t", service.prompts.text_prompt("once"), SamplingParams(max_tokens=4))
        chunks = [chunk async for chunk in service.client.generate(request)]
        await service.client.close()
        return chunks[-1].output_tokens

    assert 1 <= asyncio.run(scenario()) <= 4


def test_only_text_models_log_their_default_format(
    text_checkpoint: Path, tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A speech family has one format and logs no reason for it."""
    for folder in (text_checkpoint, tiny_checkpoint):
        caplog.clear()
        with caplog.at_level("INFO", "llm.config"):
            closed(create_service(tiny_config(folder)))
        assert "encoding: float32" in caplog.messages
        reasons = [line for line in caplog.messages if "holds its weights as" in line]
        assert len(reasons) == (folder is text_checkpoint)


def test_another_registered_decoder_may_be_selected(folder: Path) -> None:
    """A registered codec by name instead of the checkpoint's own folder."""
    shutil.rmtree(folder / "codec")
    with pytest.raises(DecoderConfigError, match="weights"):
        create_service(tiny_config(folder))
    with pytest.raises(CheckpointError, match=r"<\|s_64\|>"):  # it has more codes than tokens
        create_service(tiny_config(folder, audio_decoder="ramp"))


def test_a_codec_folder_may_be_named(folder: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.move(folder / "codec", tmp_path / "elsewhere"))
    service = closed(create_service(tiny_config(folder, audio_decoder=str(elsewhere))))
    assert service.codec is not None
    assert service.codec.codebook_size == 64


def test_decoder_weights_may_be_named(folder: Path, tmp_path: Path) -> None:
    """The weights at the named path are loaded."""
    other = build_tiny_checkpoint(tmp_path / "other", seed=5) / "codec"
    weights = load_file(other / "model.safetensors")
    without_encoder = {k: v for k, v in weights.items() if not k.startswith("encoder.")}
    save_file(without_encoder, other / "decoder.safetensors")
    config = tiny_config(folder, audio_decoder_weights=str(other / "decoder.safetensors"))
    service = closed(create_service(config))
    assert service.codec is not None
    assert not service.codec.can_encode


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("speech.json", {"family": "whistle"}, "unknown family 'whistle'"),
        ("speech.json", {"end_of_speech": "<|never|>"}, r"no token <\|never\|>"),
        ("voices.json", {"default": "unknown"}, "'unknown' is not among"),
        (
            "voices.json",
            {"default": "a", "voices": [{"name": "a", "control_token": "<|voice_99|>"}]},
            r"no token <\|voice_99\|>",
        ),
    ],
)
def test_errors_for_broken_checkpoints_name_the_problem(
    folder: Path, name: str, values: dict[str, object], message: str
) -> None:
    edit(folder / name, **values)
    with pytest.raises(CheckpointError, match=message):
        create_service(tiny_config(folder))


def test_the_default_is_the_embedded_voice() -> None:
    values = default_values()
    assert values["model"]["model_path"] == str(embedded_folder())
    assert embedded_folder().parent.name == "tts"


def test_a_built_in_voice_is_one_page_of_the_prefix_cache(tiny_checkpoint: Path) -> None:
    config = AudioGenerationConfig(**default_values())
    codec = json.loads((embedded_folder() / "codec" / "config.json").read_text())
    assert config.model.kv_cache.kv_cache_page_size == codec["voice_tokens"]
    assert AudioGenerationConfig.merged(
        default_values(), {"model": {"kv_cache": {"kv_cache_page_size": 64}}}
    )["model"]["kv_cache"] == {"kv_cache_page_size": 64}
    other = AudioGenerationConfig(**default_values(tiny_checkpoint))
    assert other.model.kv_cache.kv_cache_page_size == 128


def test_defaults_are_the_lowest_layer(tiny_checkpoint: Path) -> None:
    config = load_config(
        AudioGenerationConfig, {"buffer": 3}, environ={}, base=default_values(tiny_checkpoint)
    )
    assert (config.audio_decoder, config.buffer) == ("auto", 3)
    assert config.model.model_path == str(tiny_checkpoint)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 3), (64, 4)])
def test_one_cpu_core_is_reserved_for_the_event_loop(cores: int, threads: int) -> None:
    assert cpu_threads(cores) == threads


def test_the_test_mode_needs_no_weight_files(folder: Path) -> None:
    """The weights are random but reproducible; without the mode the missing files are an error."""
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    with pytest.raises((CheckpointError, DecoderConfigError), match="safetensors"):
        create_service(tiny_config(folder))
    request = SpeechRequest("Hello.", sampling=SamplingOverrides(seed=1, max_tokens=12))
    spoken = []
    for _ in range(2):
        service = create_service(tiny_config(folder, run_model_test_mode=True))
        assert service.synthesizer is not None
        spoken.append(asyncio.run(service.synthesizer.synthesize(request)).audio)
        closed(service)
    assert len(spoken[0]) > 1000
    assert spoken[0] == spoken[1]
    assert len(set(spoken[0])) > 20  # sound, not silence


@pytest.mark.parametrize("is_tied", [True, False])
def test_memory_planning_counts_random_weights(folder: Path, is_tied: bool) -> None:
    """The planned number of bytes is that of the files, except for the norms."""
    path = folder / "config.json"
    edit(path, tie_word_embeddings=is_tied)
    values = json.loads(path.read_text())
    stored = LlamaModel.estimate_weights_size(tiny_config(folder))
    stored += 0 if is_tied else 4 * values["vocab_size"] * values["hidden_size"]  # no head in it
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    planned = LlamaModel.estimate_weights_size(tiny_config(folder, run_model_test_mode=True))
    assert planned == pytest.approx(stored, rel=0.01)
    assert planned < stored


def test_the_test_mode_prefers_existing_weights(tiny_checkpoint: Path, service: Service) -> None:
    request = SpeechRequest("Hello.", sampling=SamplingOverrides(seed=1, max_tokens=12))
    assert service.synthesizer is not None
    expected = asyncio.run(service.synthesizer.synthesize(request)).audio
    tested = create_service(tiny_config(tiny_checkpoint, run_model_test_mode=True))
    assert tested.synthesizer is not None
    assert asyncio.run(tested.synthesizer.synthesize(request)).audio == expected
    closed(tested)


def test_the_configured_chat_template_is_rendered(
    tiny_checkpoint: Path, tmp_path: Path, service: Service
) -> None:
    (tmp_path / "chat.jinja").write_text("<{{ messages[0]['content'] }}>")
    config = tiny_config(tiny_checkpoint, chat_template=tmp_path / "chat.jinja")
    changed = closed(create_service(config))
    messages = [ChatMessage(ChatRole.USER, "Hi")]
    assert changed.prompts.chat_prompt(messages) == tuple(b"<Hi>")
    assert service.prompts.chat_prompt(messages) != tuple(b"<Hi>")
