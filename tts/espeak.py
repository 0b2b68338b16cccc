"""Text as phonemes, by espeak-ng: an optional extra, for models that were trained on them."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from llm import CheckpointError

_EXTRA = "pip install 'sonant[espeak]'"


class EspeakPhonemes:
    """International phonetic letters with stress; punctuation stays where it was.

    Raises CheckpointError, saying what to install, when the packages or espeak-ng are not there.
    """

    def __init__(self, language: str) -> None:
        self._backend = _backend(language)

    def of_text(self, text: str) -> str:
        """Phonemes of a text, one space between words."""
        return " ".join(self._backend.phonemize([text])[0].split())


def _backend(language: str) -> Any:
    try:
        backend = import_module("phonemizer.backend")
        wrapper = import_module("phonemizer.backend.espeak.wrapper")
    except ImportError as error:
        raise CheckpointError(f"this model reads phonemes: {_EXTRA} ({error})") from error
    _use_bundled_library(wrapper.EspeakWrapper)
    logger = logging.getLogger(__name__)
    try:
        return backend.EspeakBackend(
            language, preserve_punctuation=True, with_stress=True, logger=logger
        )
    except RuntimeError as error:
        raise CheckpointError(f"espeak-ng does not work: {error}; {_EXTRA}") from error


def _use_bundled_library(wrapper: Any) -> None:
    """The library of the package espeakng-loader, where it is installed; else the system's."""
    try:
        loader = import_module("espeakng_loader")
    except ImportError:
        return
    wrapper.set_library(loader.get_library_path())
    wrapper.set_data_path(loader.get_data_path())
