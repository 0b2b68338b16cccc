"""Voices: built into a checkpoint, created by clients, or cloned from recordings."""
