"""Patterns as branches of dense kernels, whose partial results are merged.

Imports kernels' own files, spec and the ground.
Public: nothing.
"""
