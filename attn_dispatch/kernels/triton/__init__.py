"""Fused Triton kernels, forward and backward, over branches and over tiles.

Imports kernels' own files, spec and the base modules; triton when a kernel is loaded.
Public: nothing.
"""
