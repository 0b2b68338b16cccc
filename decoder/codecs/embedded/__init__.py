"""The built-in voice's codec."""
