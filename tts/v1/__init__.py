"""Generated from proto/tts/v1 by `make proto`; never edited by hand."""
