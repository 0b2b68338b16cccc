"""Texts of the calls of Riva's client, for the program that makes them and for the test."""

TEXT = "Good morning. It is 5 past nine."
PHRASES = ["Good morning", "", "It is 5 past nine."]
CLIP_TEXT = "This is what I said in the recording."
