"""Make the clips of docs/listen.md, and its table: `python -m docs.tools.clips`.

Every text is spoken by the built-in voice in process with one seed, so the files are the same until
the voice changes.
"""

from __future__ import annotations

from docs.tools.site import DOCS
from tts import load

VOICES = ("hazel", "hugh")
TEXTS = {
    "news": "The first train of the morning was late again, and not one person was surprised.",
    "question": "Did you really walk all the way home in the rain?",
    "numbers": "The meeting is on May 5 at 9:45, in room 12, and it takes 30 minutes.",
    "story": "The old man closed the book. Then he smiled, and asked for a cup of tea.",
}
SEED = 7
CLIPS = DOCS / "clips"
PAGE = DOCS / "listen.md"
HEAD = f"""# Listen

Clips of the built-in voice, made by `python -m docs.tools.clips` with seed {SEED} and the defaults.
The [model card](../tts/embedded/MODEL_CARD.md) says how the voice was made and how it was judged.

| text | {" | ".join(VOICES)} |
|---|{"---|" * len(VOICES)}
"""


def name_of(voice: str, key: str) -> str:
    """Return a clip's path, relative to the page."""
    return f"clips/{voice}_{key}.flac"


def page() -> str:
    """Return the page's Markdown."""
    rows = (
        f"| {text} | {' | '.join(f'[{voice}]({name_of(voice, key)})' for voice in VOICES)} |"
        for key, text in TEXTS.items()
    )
    return HEAD + "\n".join(rows) + "\n"


def main() -> None:
    CLIPS.mkdir(exist_ok=True)
    with load() as voice:
        for name in VOICES:
            for key, text in TEXTS.items():
                voice.say(text, voice=name, seed=SEED).save(str(DOCS / name_of(name, key)))
    PAGE.write_text(page(), encoding="utf-8")
    size = sum(path.stat().st_size for path in CLIPS.iterdir())
    print(f"{len(list(CLIPS.iterdir()))} clips, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
