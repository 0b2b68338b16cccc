"""Own kernels for CUDA devices, in Triton. They know tensors; what a layer is they do not know.

Modules with kernels import triton, so they are imported where a CUDA device is used, not before.
"""
