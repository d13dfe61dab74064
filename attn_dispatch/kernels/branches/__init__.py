"""Patterns computed branch by branch with dense kernels; partial results are merged.

Imports kernels' own files, spec and the base modules.
Public: nothing.
"""
