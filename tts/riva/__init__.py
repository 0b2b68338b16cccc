"""Riva's protocol on the gRPC port: its messages become those of SpeechService, and back."""
