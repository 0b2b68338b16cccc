"""The recipe on a machine that has a GPU and no network: a folder that holds all it needs."""
