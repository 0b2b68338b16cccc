"""Requirements of speech families: files of the checkpoint, packages and text."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from decoder.codecs.ramp import ramp_spec
from llm import CheckpointError
from tests.tts.family_checkpoints import ramp_codec, write_vyvo_on_llama
from tests.tts.ramp import RampClient, build, collect_speech
from tts.families.base import Checkpoint, FamilyTraits
from tts.families.espeak import EspeakPhonemes
from tts.families.llasa import LlasaFamily
from tts.families.prompt import PromptBuilder
from tts.families.registry import find_family
from tts.text.lexicon.entries import Alphabet, Lexicon, Pronunciation
from tts.text.markup.ssml import read_ssml
from tts.text.segmenter import TextNormalization, TextOptions, split_text
from tts.voices.types import Voice, VoicePrompt


def test_the_error_without_phoneme_packages_names_them(
    neutts_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "phonemizer.backend", None)
    with pytest.raises(CheckpointError, match=r"reads phonemes: pip install 'sonant\[espeak\]'"):
        find_family(Checkpoint(neutts_folder))


def test_neutts_may_read_another_language(neutts_folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(neutts_folder / name)
    (tmp_path / "speech.json").write_text('{"family": "neutts", "language": "de"}')
    family = find_family(Checkpoint(tmp_path))
    assert family is not None
    assert family.traits.language == "de"
    vocabulary = family.vocabulary(ramp_spec(ramp_codec(24_000)))
    ids = family.prompt(vocabulary, "ja", Voice("me", prompt=VoicePrompt((1,))))
    assert family.tokenizer.decode(ids[34:-1]).startswith("jˈɑː")


def test_neutts_reads_phonemes_of_a_lexicon_among_words(neutts_folder: Path) -> None:
    prompts = PromptBuilder.load(neutts_folder, ramp_spec(ramp_codec(24_000)))
    said = prompts.pronounced(Pronunciation("tomato", "T AH0 M AA1 T OW0", Alphabet.ARPABET))
    assert said == Pronunciation("tomato", "təmˈɑtoʊ", Alphabet.IPA)
    with pytest.raises(ValueError, match="'日' is no sign"):
        prompts.pronounced(Pronunciation("x", "日", Alphabet.IPA))
    voice = Voice("me", prompt=VoicePrompt((1,)))
    ids = prompts.speech_prompt("Hello, ⟨təmˈɑtoʊ⟩ world ⟨ə⟩ ⟨b⟩.", voice)
    spoken = prompts.tokenizer.decode(ids[34:-1])
    assert spoken.startswith("həlˈoʊ, təmˈɑtoʊ wˈɜːld ə b.")


def test_a_language_unknown_to_espeak_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="espeak-ng does not work"):
        EspeakPhonemes("xx-yy")


def test_phonemes_keep_stress_and_punctuation() -> None:
    espeak = EspeakPhonemes("en-us")
    assert espeak.of_text("Hello, world.  It works!") == "həlˈoʊ, wˈɜːld. ɪt wˈɜːks!"


def without_gaps(vocab: dict[str, int], size: int) -> dict[str, int]:
    """Fill gaps in the ids: the library numbers added tokens from the last text token."""
    names = {token_id: name for name, token_id in vocab.items()}
    return {names.get(k, f"<text {k}>"): k for k in range(size)}


def test_the_prompt_of_llasa_equals_that_of_transformers(llasa: Path, tmp_path: Path) -> None:
    """The reference is the template with the assistant's turn continued."""
    from transformers import PreTrainedTokenizerFast

    settings = json.loads((llasa / "tokenizer_config.json").read_text())
    full = json.loads((llasa / "tokenizer.json").read_text())
    full["model"]["vocab"] = without_gaps(full["model"]["vocab"], 128_000)
    (tmp_path / "tokenizer.json").write_text(json.dumps(full))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token=settings["bos_token"]
    )
    text = "It's 5 o'clock, isn't it? Größe: «3,50 €»\n今天"
    asked = "<|TEXT_UNDERSTANDING_START|>{}<|TEXT_UNDERSTANDING_END|>".format(f"My words. {text}")
    turns = [
        {"role": "user", "content": f"Convert the text to speech:{asked}"},
        {"role": "assistant", "content": "<|SPEECH_GENERATION_START|><|s_7|><|s_65535|>"},
    ]
    expected = tokenizer.apply_chat_template(
        turns,
        chat_template=settings["chat_template"],
        continue_final_message=True,
        date_string="26 Jul 2024",
        return_dict=False,
    )
    builder = PromptBuilder.load(llasa, RampClient(codebook_size=65_536).codec)
    mine = Voice("mine", prompt=VoicePrompt((7, 65_535), "My words."))
    assert builder.speech_prompt(text, mine) == tuple(expected)


def test_llasa_without_a_chat_template_is_an_error(llasa: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(llasa / name)
    with pytest.raises(CheckpointError, match="needs the chat template"):
        find_family(Checkpoint(tmp_path))


def test_a_codec_with_other_codes_is_an_error(llasa: Path) -> None:
    family = find_family(Checkpoint(llasa))
    assert isinstance(family, LlasaFamily)
    with pytest.raises(CheckpointError, match=r"frames of 1 codes below 65536, codec 'ramp' reads"):
        family.vocabulary(ramp_spec({"codebook_size": 4096}))


def test_a_named_family_must_fit_the_checkpoint(llasa: Path, tiny_checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="has not the 28682 tokens of orpheus"):
        find_family(Checkpoint(llasa), "orpheus")
    with pytest.raises(CheckpointError, match="unknown family 'bark'; supported: embedded, csm"):
        find_family(Checkpoint(tiny_checkpoint), "bark")


def test_vyvo_on_llama_is_distinguished_from_orpheus_by_its_unnamed_tokens(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_vyvo_on_llama(tmp_path))
    found = find_family(checkpoint)
    assert found is not None
    assert found.name == "vyvo"
    assert found.voices().default == "default"
    named = find_family(checkpoint, "orpheus")
    assert named is not None
    assert named.name == "orpheus"
    assert "tara" in [voice.name for voice in named.voices().voices]


def test_a_family_is_changed_by_speech_json(llasa: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(llasa / name)
    changes = {"family": "llasa", "max_codes": 300, "codec": "other", "voices": "mine.json"}
    (tmp_path / "speech.json").write_text(json.dumps(changes))
    family = find_family(Checkpoint(tmp_path))
    assert isinstance(family, LlasaFamily)
    assert family.traits == replace(
        family.own_traits(), max_codes=300, codec="other", voices_file="mine.json"
    )
    (tmp_path / "speech.json").write_text(json.dumps(changes | {"any_voice": "x"}))
    with pytest.raises(CheckpointError, match="llasa has no any_voice; there are: codec, family"):
        find_family(Checkpoint(tmp_path))


# --- text


def spoken(text: str, **options: object) -> list[str]:
    made = FamilyTraits(**options).text_options()  # type: ignore[arg-type]
    return [segment.text for segment in split_text(text, made)]


def test_tags_are_kept_and_the_rest_is_normalized() -> None:
    text = "Ha <laugh> it cost $3, <sigh>ok? Then <giggle> 5 more. <yawn>"
    assert spoken(text, tags=("<laugh>", "<sigh>", "<yawn>")) == [
        "Ha <laugh> it cost three dollars <sigh> ok?",
        "Then giggle five more.",
        "<yawn>",
    ]


def test_text_ranges_of_tagged_text_join() -> None:
    text = "Oh <sigh> no. That <laugh> is 5."
    options = TextOptions(tags=("<sigh>", "<laugh>"))
    ranges = [(s.start, s.end) for s in split_text(text, options)]
    assert ranges[0][0] == 0
    assert ranges[1] == (ranges[0][1], len(text))


def test_other_languages_keep_their_letters_and_figures() -> None:
    assert spoken("今天3点见。", language="") == ["今天3点见."]
    assert spoken("Café, 5 €.", language="en") == ["Café, five euros."]


@pytest.mark.parametrize(
    ("languages", "ascii_only", "said"),
    [
        ((), False, "J'ai two chats."),
        (("en-GB", "fr-FR"), False, "J'ai two chats."),
        (("fr-FR",), False, "J'ai deux chats."),
        (("fr-FR", "fr-CA"), False, "J'ai deux chats."),
        (("fr-FR", "de"), False, "J'ai 2 chats."),  # either could be meant
        (("nl",), False, "J'ai 2 chats."),  # has no reader
        (("fr-FR",), True, "J'ai two chats."),  # a model that was made for English alone
    ],
)
def test_figures_are_read_in_the_language_of_the_voice(
    languages: tuple[str, ...], ascii_only: bool, said: str
) -> None:
    traits, voice = FamilyTraits(ascii_only=ascii_only), Voice("v", language_codes=languages)
    found = split_text("J'ai 2 chats.", traits.text_options(None, voice))
    assert [segment.text for segment in found] == [said]
    told = traits.text_options(TextNormalization.OFF, voice)
    assert [segment.text for segment in split_text("J'ai 2 chats.", told)] == ["J'ai 2 chats."]


def test_the_voice_of_a_request_decides_the_language(
    client: RampClient, tiny_checkpoint: Path
) -> None:
    """The language is the default voice's, unless the request names another voice."""
    synthesizer = build(client, tiny_checkpoint)
    synthesizer.settings = replace(synthesizer.settings, traits=FamilyTraits())
    french = Voice("v", language_codes=("fr",), control_token="<|voice_0|>")
    collect_speech(synthesizer, "2 ans.", voice=french)
    collect_speech(synthesizer, "2 years.")
    texts = [bytes(i for i in job.request.prompt_ids if i < 256) for job in client.jobs]
    assert texts == [b"deux ans.", b"two years."]


@pytest.mark.parametrize(
    ("voice", "language", "text"),
    [
        (Voice("v", language_codes=("es",)), "es", "Sí, dos años"),
        (Voice("v", language="es-MX"), "es-MX", "Sí, dos años"),
        (Voice("v", language_codes=("fr",)), "en", "Si, two anos"),
        (Voice("v", language_codes=("en-US", "es")), "en", "Si, two anos"),
        (None, "en", "Si, two anos"),
    ],
)
def test_an_ascii_model_may_read_the_letters_of_some_languages(
    voice: Voice | None, language: str, text: str
) -> None:
    traits = FamilyTraits(ascii_only=True, letters={"es": frozenset("íñ")})
    options = traits.text_options(None, voice)
    assert options.language == language
    assert [segment.text for segment in split_text("Sí, 2 años", options)] == [text]
    lexicon = Lexicon.of([Pronunciation("años", "eras")], ascii_only=traits.ascii_only)
    told = replace(options, lexicons=(lexicon,))
    (said,) = split_text("Sí, 2 años", told)
    assert said.text.endswith("eras")


def test_the_language_of_a_request_reaches_its_text(
    client: RampClient, tiny_checkpoint: Path
) -> None:
    """Also inside SSML, where a language of a part takes precedence, and in `say-as`."""
    synthesizer = build(client, tiny_checkpoint)
    synthesizer.settings = replace(synthesizer.settings, traits=FamilyTraits())
    german = Voice("v", control_token="<|voice_0|>", language="de")
    collect_speech(synthesizer, "Am 3. Mai.", voice=german)
    source = (
        "<speak>Um 8 Uhr, <say-as interpret-as='ordinal'>3</say-as>, "
        "<lang xml:lang='fr'><say-as interpret-as='cardinal'>71</say-as></lang> oder 2 mal.</speak>"
    )
    collect_speech(synthesizer, source, voice=german, markup=read_ssml(source))
    texts = [bytes(i for i in job.request.prompt_ids if i < 256) for job in client.jobs]
    assert [text.decode() for text in texts] == [
        "Am dritten Mai.",
        "Um acht Uhr, dritter, soixante et onze oder zwei mal.",
    ]


def test_languages_change_inside_a_text_of_an_ascii_model_where_it_reads_the_letters_of_one(
    client: RampClient, tiny_checkpoint: Path
) -> None:
    synthesizer = build(client, tiny_checkpoint)
    traits = FamilyTraits(ascii_only=True, letters={"es": frozenset("íñ")})
    synthesizer.settings = replace(synthesizer.settings, traits=traits)
    source = (
        "<speak>Sí, 2 <lang xml:lang='{0}'><say-as interpret-as='cardinal'>2</say-as> y 2</lang>."
        "</speak>"
    )
    for language, other in (("es", "en"), ("en", "es")):
        voice = Voice("v", control_token="<|voice_0|>", language=language)
        document = source.format(other)
        collect_speech(synthesizer, document, voice=voice, markup=read_ssml(document))
    texts = [bytes(i for i in job.request.prompt_ids if i < 256) for job in client.jobs]
    assert [text.decode() for text in texts] == ["Sí, dos two y two.", "Si, two two y two."]
