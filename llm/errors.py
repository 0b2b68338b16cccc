"""Errors of the token core. All of them derive from `LLMError`; messages say what to change."""

from __future__ import annotations


class LLMError(Exception):
    """Base class of the errors that the core raises."""


class ConfigError(LLMError, ValueError):
    """A configuration value is wrong, or names a feature that this release does not have."""


class CheckpointError(LLMError, ValueError):
    """A checkpoint cannot be read: a file, a tensor or a config key is missing or unknown."""


class RequestError(LLMError, ValueError):
    """One request is malformed (ids, lengths, sampling numbers); others are not affected."""


class CapacityError(LLMError, RuntimeError):
    """A request can never fit into the KV pool, or the pool cannot be allocated at all."""


class QueueFullError(LLMError, RuntimeError):
    """The pending queue is at its bound; try again later."""


class EngineStoppedError(LLMError, RuntimeError):
    """The engine is draining or has stopped, so it takes no new requests."""


class RanksLostError(LLMError, RuntimeError):
    """A process of a model on several devices has ended; no more steps can run."""
