"""The tensor interface of the runner."""
