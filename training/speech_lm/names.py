"""Names of the voices, by the teacher's voice that each learned from; the first is the default."""

from __future__ import annotations

import json
from pathlib import Path

NAMES = {
    "af_heart": "hazel",
    "am_michael": "owen",
    "bf_emma": "edith",
    "bm_george": "hugh",
    "af_alloy": "opal",
    "af_aoede": "thea",
    "af_bella": "gwen",
    "af_jessica": "paige",
    "af_kore": "maeve",
    "af_nicole": "fern",
    "af_nova": "vera",
    "af_river": "willa",
    "af_sarah": "ruth",
    "af_sky": "celia",
    "am_adam": "boyd",
    "am_echo": "miles",
    "am_eric": "clark",
    "am_fenrir": "wade",
    "am_liam": "reed",
    "am_onyx": "grant",
    "am_puck": "finn",
    "am_santa": "noel",
    "bf_alice": "audrey",
    "bf_isabella": "olive",
    "bf_lily": "poppy",
    "bm_daniel": "basil",
    "bm_fable": "rupert",
    "bm_lewis": "ellis",
    "ef_lucia": "lucia",
    "em_diego": "diego",
}
ACCENTS = {
    "a": ("US English", "en-US"), "b": ("British English", "en-GB"), "e": ("Spanish", "es"),
}  # fmt: skip
SEXES = {"f": "female", "m": "male"}


def entry(teacher: str, codes: list[int]) -> dict[str, object]:
    """An entry of the service's voices.json."""
    accent, language = ACCENTS[teacher[0]]
    name = NAMES.get(teacher, teacher)
    return {
        "name": name,
        "display_name": f"{name.capitalize()} ({accent}, {SEXES[teacher[1]]})",
        "language_codes": [language],
        "codes": codes,
    }


def rows_of(path: Path) -> dict[str, list[int]]:
    """Read the voices.json of a training or of an exported voice: rows of codes by the teacher's
    names."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if "voices" not in found:
        return dict(found)
    theirs = {ours: name for name, ours in NAMES.items()}
    return {theirs.get(voice["name"], voice["name"]): voice["codes"] for voice in found["voices"]}
