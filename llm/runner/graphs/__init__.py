"""CUDA graphs of forward passes."""
