"""Conversion of text to phonemes by espeak-ng, an optional dependency."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from llm import CheckpointError

_EXTRA = "pip install 'sonant[espeak]'"


class EspeakPhonemes:
    """Phonemizer to the International Phonetic Alphabet with stress marks; keeps punctuation.

    Raises CheckpointError, with what to install, if the packages or espeak-ng are missing.
    """

    def __init__(self, language: str) -> None:
        self._backend = _backend(language)

    def of_text(self, text: str) -> str:
        """Return the phonemes of a text, with single spaces between words."""
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
    """Use the library of the package espeakng-loader, if installed, else the system's."""
    try:
        loader = import_module("espeakng_loader")
    except ImportError:
        return
    wrapper.set_library(loader.get_library_path())
    wrapper.set_data_path(loader.get_data_path())
