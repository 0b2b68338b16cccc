"""Short client programs; each is executed by a test."""
