"""Values of SSML's attributes: lengths of breaks, speaking rates, volumes and pitches.

The functions raise ValueError with what a value must be.
"""

from __future__ import annotations

import math
import re

RATES = {"x-slow": 0.5, "slow": 0.64, "medium": 1.0, "default": 1.0, "fast": 1.55, "x-fast": 2.0}
MIN_RATE, MAX_RATE = 0.25, 4.0
SILENT_DB = -96.0
VOLUMES = {
    "silent": SILENT_DB,
    "x-soft": -12.0,
    "soft": -6.0,
    "medium": 0.0,
    "default": 0.0,
    "loud": 6.0,
    "x-loud": 12.0,
}
FULL_VOLUME = 100.0  # of volumes without a unit
STRENGTHS = {
    "none": 0.0,
    "x-weak": 0.25,
    "weak": 0.5,
    "medium": 0.75,
    "strong": 1.0,
    "x-strong": 1.25,
}
PITCHES = {
    "x-low": -6.0,
    "low": -3.0,
    "medium": 0.0,
    "default": 0.0,
    "high": 3.0,
    "x-high": 6.0,
}
MAX_PITCH = 12.0  # semitones up or down
_NUMBER = r"(\d{1,6}(?:\.\d{0,6})?|\.\d{1,6})"
_TIME = re.compile(rf"\+?{_NUMBER}(ms|s)")
_RATE = re.compile(rf"([+-]?){_NUMBER}(%?)")
_DECIBELS = re.compile(rf"([+-]?){_NUMBER}dB", re.I)
_UNCHANGED_PITCH = re.compile(r"[+-]?0+(?:\.0+)?(?:%|st|Hz)?")
_PITCH = re.compile(rf"([+-]){_NUMBER}(%|st)")
_HERTZ = re.compile(rf"[+-]?{_NUMBER}Hz", re.I)
_VOLUME = re.compile(rf"([+-]?){_NUMBER}%?")


def seconds_of(time: str | None, strength: str | None) -> float:
    """Return the seconds of a break; without a time and a strength it is a medium one."""
    if time is None:
        if strength not in (None, *STRENGTHS):
            raise ValueError(f"strength must be one of {', '.join(STRENGTHS)}")
        return STRENGTHS[strength or "medium"]
    match = _TIME.fullmatch(time.strip())
    if match is None:
        raise ValueError("time must be a number of seconds or milliseconds, as in 1.5s or 250ms")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def rate_of(value: str, current: float) -> float:
    """Return a speaking rate: a label, a factor, a percentage, or a change by a percentage."""
    value = value.strip()
    if value in RATES:
        return RATES[value]
    match = _RATE.fullmatch(value)
    if match is None or (match[1] and not match[3]):
        raise ValueError(f"rate must be one of {', '.join(RATES)}, or as in 80%, +10% or 0.8")
    amount = float(match[2]) / (100 if match[3] else 1)
    rate = current * _changed(match[1], amount)
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ValueError(f"rate must be in {MIN_RATE:.0%} to {MAX_RATE:.0%}")
    return rate


def gain_of(value: str, current_db: float) -> float:
    """Return a gain in dB for a volume: a label, decibels, a number up to 100, or a change."""
    value = value.strip()
    if value in VOLUMES:
        return VOLUMES[value]
    if match := _DECIBELS.fullmatch(value):
        return current_db + float(match[2]) * (-1 if match[1] == "-" else 1)
    match = _VOLUME.fullmatch(value)
    if match is None or (not match[1] and float(match[2]) > FULL_VOLUME):
        raise ValueError(f"volume must be one of {', '.join(VOLUMES)}, or as in +6dB, 80 or +10%")
    factor = _changed(match[1], float(match[2]) / FULL_VOLUME)
    decibels = 20 * math.log10(factor) if factor > 0 else SILENT_DB
    return current_db + decibels if match[1] else decibels


def pitch_of(value: str, current: float) -> float:
    """Return a pitch in semitones above the voice's own: a label, or a change of `current`."""
    value = value.strip()
    if value in PITCHES:
        return PITCHES[value]
    if _UNCHANGED_PITCH.fullmatch(value):
        return current
    match = _PITCH.fullmatch(value)
    if match is None:
        if _HERTZ.fullmatch(value):
            raise ValueError("a pitch in Hz is not available: voices differ; use +2st or +10%")
        raise ValueError(f"pitch must be one of {', '.join(PITCHES)}, or as in +2st or -10%")
    if match[3] == "st":
        change = float(match[1] + match[2])
    else:
        factor = _changed(match[1], float(match[2]) / 100)
        change = 12 * math.log2(factor) if factor > 0 else -math.inf
    if not abs(current + change) <= MAX_PITCH:
        raise ValueError(f"pitch must be within {MAX_PITCH:g} semitones of the voice's own")
    return current + change


def _changed(sign: str, amount: float) -> float:
    """Return the factor of an amount, which is a change if it has a sign."""
    return {"": amount, "+": 1 + amount, "-": 1 - amount}[sign]
