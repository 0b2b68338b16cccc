"""Kernels of audio decoders on a GPU."""
