"""Pronunciation lexicons: entries by phrase, their files, and their alphabets."""
