"""ARPAbet in IPA, and IPA as English respellings."""

from __future__ import annotations

import pytest

from tts.text.lexicon.alphabets import (
    ARPABET,
    arpabet_to_ipa,
    bare_ipa,
    check_signs,
    is_arpabet,
    respelled,
)

RESPELLED = """
təˈmeɪtoʊ tuhmaytoh  təˈmɑːtəʊ tuhmahtoh  ˈsiːkwəl seekwuhl  wɪn win  dʒɪf jif  ɡɪf ghif
kuːl kool  ˈæpəl appuhl  ˈɔːɹəndʒ oruhnj  θɪŋk thingk  ðɪs thiss  ʃuː shoo  tʃɜːtʃ cherch
dʒʌdʒ juhj  ˈmɛʒɚ mezher  sɪŋ sing  ˈfɪŋɡɚ finger  bɔɪ boy  haʊs howss  taɪm tighm  aɪs eyess
keɪˈɒs kay-oss  pəˈliːs puhleess  ɡɛt ghet  ˈɡiːzɚ gheezer  ˈbɒks box  kwiːn kween  jɛs yess
ˈfaɪɚ figh-er  ˈfaɪəɹ fire  kɑɹ kar  kɛɹ kair  fɪɹ feer  fɔɹ for  tʊɹ toor  ˈnjuː nyoo
ʒɑ̃ zhahn  bɔ̃ʒuʁ bawnzhoor  ˈmyːnçn̩ moonshn  lɔx lawkh  ˈɪstənˌbʊl istuhnbool
ˈzaɪlɒfoʊn zighloffohn  ˈkwɪnoʊ kwinnoh  nɪʃ nish  ˈkɜɹnəl kernuhl  aɪˈdiːə eyedee-uh
ˈtɛnɪs tenniss  ˈmɪtən mittuhn  ˈpɪkəl pickuhl  juːˈbʊntuː yooboontoo  ˈdʒeɪsən jaysuhn
ˈɛŋɡəlz enguhlz  oʊ oh  aɪ eye  ə uh  t͡ʃɛk chek  ɡ g  ˈbɜːti bertee  seɪ̯ say
"""
"""Words in IPA, each with its respelling."""
WORDS = RESPELLED.split()


@pytest.mark.parametrize(("ipa", "spelling"), [*zip(WORDS[::2], WORDS[1::2], strict=True)])
def test_respellings(ipa: str, spelling: str) -> None:
    assert respelled(ipa) == spelling


def test_words_of_a_phrase_are_respelled_one_by_one() -> None:
    assert respelled("nuː jɔɹk ʔ") == "noo york"


@pytest.mark.parametrize("ipa", ["日", "wɜ!d", "a1", "⟨a⟩", "x+y"])
def test_other_signs_are_named(ipa: str) -> None:
    with pytest.raises(ValueError, match=r"is no sign of the International Phonetic Alphabet"):
        check_signs(ipa)


@pytest.mark.parametrize("ipa", ["", "ˈ", "ʔ", "."])
def test_a_pronunciation_without_sounds_is_an_error(ipa: str) -> None:
    with pytest.raises(ValueError, match="no sound"):
        respelled(ipa)


@pytest.mark.parametrize(
    ("phones", "ipa"),
    [
        ("T AH0 M EY1 T OW2", "təmˈeɪtˌoʊ"),
        ("{@K}{@AE1}{@T}", "kˈæt"),
        ("{@B} {@ER0}{@D}", "bəɹd"),
        ("B ER1 D", "bˈɜɹd"),
        ("K AH T", "kʌt"),
        ("JH AH1 JH", "dʒˈʌdʒ"),
    ],
)
def test_arpabet_in_ipa(phones: str, ipa: str) -> None:
    assert arpabet_to_ipa(phones) == ipa
    check_signs(ipa)


def test_every_phone_has_signs_of_ipa() -> None:
    assert len(ARPABET) > 39
    for phone in ARPABET:
        check_signs("a" + arpabet_to_ipa(phone))


@pytest.mark.parametrize(
    "text", ["T ZZ1", "T1 AH0", "t ah0", "T AH3", "AH01", "{@T}{@Z9}", "T,AH0"]
)
def test_other_phones_are_named(text: str) -> None:
    assert not is_arpabet(text)
    with pytest.raises(ValueError, match="is no phone of ARPAbet"):
        arpabet_to_ipa(text)


@pytest.mark.parametrize(
    ("text", "is_phones"),
    [
        ("HH AH0 L OW1", True),
        ("{@HH}{@AH0}", True),
        ("{@HH}", True),
        ("HH AH L OW", False),  # words in capitals are letters without a stress
        ("AY", False),
        ("ES CUE EL1", False),
        ("", False),
    ],
)
def test_arpabet_is_recognised_by_a_stress_or_braces(text: str, is_phones: bool) -> None:
    assert is_arpabet(text) is is_phones


def test_brackets_of_ipa_are_left_out() -> None:
    assert bare_ipa(" /nuː  jɔɹk/ ") == "nuː jɔɹk"
    assert bare_ipa("[wɪn]") == "wɪn"
