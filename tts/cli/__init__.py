"""Implementation of the command `python -m tts.say`."""
