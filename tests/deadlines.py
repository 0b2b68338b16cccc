"""Limit of the time that a test waits for something that does happen."""

from __future__ import annotations

HANG_S = 400.0
"""Only a hang takes so long: below pytest's own limit of a test, so that the waiting place fails.

A time limit that a test is about, such as a server's, is not this one.
"""
