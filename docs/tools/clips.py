"""Make the clips of docs/listen.md, and its tables: `python -m docs.tools.clips`.

Every text is spoken by the built-in voice in process with one seed, so the files are the same until
the voice changes.
"""

from __future__ import annotations

from collections.abc import Iterator

from docs.tools.site import DOCS
from tts import load

SPOKEN = (
    (
        ("hazel", "hugh"),
        {
            "news": "The first train of the morning was late again.",
            "question": "Did you really walk all the way home in the rain?",
            "numbers": "The meeting is on May 5 at 9:45, in room 12.",
            "story": "The old man closed the book. Then he smiled, and asked for a cup of tea.",
        },
    ),
    (("lucia", "diego"), {"tren": "El tren de las 9:45 llegó tarde otra vez."}),
)
"""Voices, and the texts that each of them speaks, by a part of the file's name."""
SEED = 7
CLIPS = DOCS / "clips"
PAGE = DOCS / "listen.md"
HEAD = f"""# Listen

Clips of the built-in voice, made by `python -m docs.tools.clips` with seed {SEED} and the defaults.
The [model card](../tts/embedded/MODEL_CARD.md) says how the voice was made and how it was judged.
"""


def name_of(voice: str, key: str) -> str:
    """Return a clip's path, relative to the page."""
    return f"clips/{voice}_{key}.flac"


def clips() -> Iterator[tuple[str, str, str]]:
    """Yield the path, voice and text of each clip."""
    for voices, texts in SPOKEN:
        for voice in voices:
            for key, text in texts.items():
                yield name_of(voice, key), voice, text


def page() -> str:
    """Return the page's Markdown."""
    parts = [HEAD]
    for voices, texts in SPOKEN:
        rows = (
            f"| {text} | {' | '.join(f'[{voice}]({name_of(voice, key)})' for voice in voices)} |"
            for key, text in texts.items()
        )
        titles = f"| text | {' | '.join(voices)} |\n|---|{'---|' * len(voices)}"
        parts.append("\n".join((titles, *rows)) + "\n")
    return "\n".join(parts)


def main() -> None:
    CLIPS.mkdir(exist_ok=True)
    with load() as speaker:
        for path, voice, text in clips():
            speaker.say(text, voice=voice, seed=SEED).save(str(DOCS / path))
    PAGE.write_text(page(), encoding="utf-8")
    size = sum(path.stat().st_size for path in CLIPS.iterdir())
    print(f"{len(list(CLIPS.iterdir()))} clips, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
