"""The Python API: a voice in this process, for programs that embed it."""
