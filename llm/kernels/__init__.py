"""Triton kernels for CUDA devices. They operate on tensors and are independent of layers.

Modules with kernels import triton, so they are imported only where a CUDA device is used.
"""
