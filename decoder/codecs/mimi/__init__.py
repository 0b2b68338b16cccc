"""The Mimi codec."""
