"""Registry of the available voices: built-in ones and those that clients create.

Created voices are bounded in number and bytes; beyond the bounds creation fails, and no voice is
evicted. With a folder they survive a restart, one JSON file each; registries of several processes
with the same folder always hold the same voices. Each keeps the identity of the codec that its
codes are of: with another codec they would be another voice or noise, so that such voices can only
be deleted. A name such as "hazel(2)+owen(1)" is that of a blend (`tts.voices.blends`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from llm import CheckpointError
from tts.errors import (
    InvalidRequestError,
    Precondition,
    PreconditionError,
    VoiceExistsError,
    VoiceNotFoundError,
)
from tts.voices.blends import blended, is_blend, read_blend
from tts.voices.files import load_voices, sample_voices
from tts.voices.folder import FileMark, VoiceFolder
from tts.voices.types import VOICE_ID, Voice, VoiceClip, VoicePrompt, VoiceSet

logger = logging.getLogger(__name__)

__all__ = [
    "VOICE_ID",
    "Voice",
    "VoiceClip",
    "VoiceLimits",
    "VoicePrompt",
    "VoiceRegistry",
    "VoiceSet",
    "load_voices",
    "sample_voices",
]


@dataclass(frozen=True, slots=True)
class VoiceLimits:
    """Limits on created voices."""

    max_voices: int = 256
    max_bytes: int = 16 * 2**20


class VoiceRegistry:
    """Voices by name. Belongs to one event loop; not thread-safe."""

    def __init__(
        self,
        builtin: Iterable[Voice],
        default: str,
        limits: VoiceLimits | None = None,
        folder: Path | None = None,
        codec: str = "",
        levels: tuple[int, ...] = (),
    ) -> None:
        """`codec`: identity of the model's codec; `levels`: its `CodecSpec.voice_levels`."""
        self._voices = {voice.name: voice for voice in builtin}
        if default and default not in self._voices:
            raise CheckpointError(f"the default voice '{default}' is not among the voices")
        self._default = default
        self._limits, self._codec, self._levels = limits or VoiceLimits(), codec, levels
        self._folder = VoiceFolder(folder) if folder else None
        self._files: dict[str, FileMark] = {}  # last versions read, by file name
        self._refresh()

    @classmethod
    def load(
        cls,
        path: Path,
        limits: VoiceLimits | None = None,
        folder: Path | None = None,
        codec: str = "",
    ) -> VoiceRegistry:
        """Return a registry of the voices in voices.json and the created ones in `folder`."""
        found = load_voices(path)
        return cls(found.voices, found.default, limits, folder, codec)

    def __len__(self) -> int:
        return len(self._voices)

    def __repr__(self) -> str:
        return f"VoiceRegistry({', '.join(self._voices)}; default {self._default})"

    @property
    def default(self) -> Voice:
        """Voice of requests that name none. Raises PreconditionError if there is no default."""
        if not self._default:
            raise PreconditionError(
                Precondition.VOICE_PROMPT,
                "this model has no voice of its own: send a recording and its transcript",
            )
        return self._voices[self._default]

    def get(self, name: str, field: str = "voice") -> Voice:
        """Return the voice of a name, which may be that of a blend.

        Raises VoiceNotFoundError with the known names, PreconditionError for a voice of another
        codec, and the errors of `blend`.
        """
        if is_blend(name):
            return self.blend(name, field)
        voice = self._find(name)
        if not self._is_usable(voice):
            raise PreconditionError(Precondition.VOICE_CODEC, self._reason(voice))
        return voice

    def blend(self, text: str, field: str) -> Voice:
        """Return the blend that a text describes.

        Raises InvalidRequestError, which names `field`, for its syntax, PreconditionError if the
        model's voices cannot be blended, and the errors of `get` for its voices.
        """
        found = read_blend(text, field)
        if not self._levels:
            raise PreconditionError(
                Precondition.VOICE_BLEND, "this model's voices cannot be blended; name one voice"
            )
        return blended(tuple((self.get(name), n) for name, n in found.parts), self._levels)

    def choose(
        self,
        name: str = "",
        language_code: str = "",
        field: str = "language",
        name_field: str = "voice",
    ) -> Voice:
        """Return the named voice; without a name the default one, or one for the language.

        Its `language` is `language_code`.

        Raises the errors of `get`, which name `name_field`, and InvalidRequestError that names
        `field` for a named voice that does not speak the language.
        """
        if not (name or language_code):
            return self.default
        voice = self._chosen(name, language_code, field, name_field)
        return replace(voice, language=language_code) if language_code else voice

    def _chosen(self, name: str, language_code: str, field: str, name_field: str) -> Voice:
        if name:
            voice = self.get(name, name_field)
            if language_code and voice.language_codes and not voice.speaks(language_code):
                speaks = f"voice '{voice.name}' speaks {', '.join(voice.language_codes)}"
                raise InvalidRequestError.of(field, speaks)
            return voice
        if self._default and self.default.speaks(language_code):
            return self.default
        for voice in self.voices(language_code):
            return voice
        raise VoiceNotFoundError(f"for language {language_code}", self._known())

    def voices(self, language_code: str = "") -> tuple[Voice, ...]:
        """Return built-in voices in their file's order, then created ones by name; none of another
        codec.
        """
        self._refresh()
        usable = filter(self._is_usable, self._voices.values())
        found = [v for v in usable if not language_code or v.speaks(language_code)]
        return tuple(sorted(found, key=lambda v: "" if v.is_builtin else v.name))

    def check_new(self, name: str) -> None:
        """Raise the errors of `create` for the name and the count, before expensive work."""
        self._refresh()
        self._check_name(name)
        if len(self._created()) >= self._limits.max_voices:
            raise PreconditionError(
                Precondition.VOICE_LIMIT,
                f"{self._limits.max_voices} voices are registered; delete one first",
            )

    def create(self, voice: Voice) -> Voice:
        """Register a voice made from a clip.

        Raises InvalidRequestError, VoiceExistsError or PreconditionError for its name or size,
        and StorageFullError or UnavailableError when it cannot be stored."""
        voice = replace(voice, codec=self._codec)
        with self._exclusive():
            self.check_new(voice.name)
            held = sum(created.num_bytes for created in self._created())
            if held + voice.num_bytes > self._limits.max_bytes:
                raise PreconditionError(
                    Precondition.VOICE_LIMIT,
                    f"registered voices may take {self._limits.max_bytes} bytes; delete one first",
                )
            if self._folder is None:
                self._voices[voice.name] = voice
            else:
                self._folder.write(voice)
                self._refresh()
        return voice

    def delete(self, name: str) -> None:
        """Delete a created voice; built-in ones cannot be deleted. Running requests keep theirs."""
        voice = self._find(name)
        if voice.is_builtin:
            raise PreconditionError(
                Precondition.BUILTIN_VOICE, f"'{name}' is built in and cannot be deleted"
            )
        if self._folder is None:
            del self._voices[name]
            return
        with self._exclusive():
            self._folder.remove(name)
            self._refresh()

    def _find(self, name: str) -> Voice:
        """Return the voice of a name, of any codec."""
        self._refresh()
        if name not in self._voices:
            raise VoiceNotFoundError(name, self._known())
        return self._voices[name]

    def _known(self) -> list[str]:
        return [voice.name for voice in self._voices.values() if self._is_usable(voice)]

    def _is_usable(self, voice: Voice) -> bool:
        return voice.is_builtin or voice.codec == self._codec

    def _reason(self, voice: Voice) -> str:
        """Return why a voice is refused, and what to do."""
        made = "of another codec" if voice.codec else "of an unknown codec, by an earlier version"
        return (
            f"voice '{voice.name}' was made with codes {made}: delete it, and create it from its "
            "recording again"
        )

    def _exclusive(self) -> AbstractContextManager[None]:
        return nullcontext() if self._folder is None else self._folder.exclusive()

    def _check_name(self, name: str) -> None:
        if not VOICE_ID.fullmatch(name):
            raise InvalidRequestError.of(
                "voice_id",
                "use 1 to 64 characters: a-z, 0-9, '_' and '-', the first a letter or digit",
            )
        if name in self._voices:
            has_other = not self._is_usable(self._voices[name])
            kind = ", of another codec: delete it first" if has_other else ""
            raise VoiceExistsError(f"there is a voice '{name}' already{kind}")

    def _created(self) -> list[Voice]:
        return [voice for voice in self._voices.values() if not voice.is_builtin]

    def _refresh(self) -> None:
        """Load the changes in the folder, made by any process."""
        if self._folder is None:
            return
        found = self._folder.marks()
        former, self._files = self._files, found
        for name in [name for name, mark in former.items() if found.get(name) != mark]:
            voice = self._voices.get(Path(name).stem)
            if voice is not None and not voice.is_builtin:
                del self._voices[voice.name]
        for name in [name for name, mark in found.items() if former.get(name) != mark]:
            self._restore(self._folder, name)

    def _restore(self, folder: VoiceFolder, name: str) -> None:
        """Load a voice that was created before; log and keep an invalid file."""
        try:
            voice = folder.read(name)
            self._check_name(voice.name)
        except (CheckpointError, InvalidRequestError, VoiceExistsError) as error:
            logger.warning("voice file %s is not used: %s", folder.path / name, error)
        else:
            self._voices[voice.name] = voice
            if not self._is_usable(voice):
                path = folder.path / name
                logger.warning("voice file %s is not used: %s", path, self._reason(voice))
