"""Patterns as lists of the tile pairs that hold visible keys, computed by a dense kernel.

Imports kernels' own files, spec and the base modules.
Public: nothing.
"""
