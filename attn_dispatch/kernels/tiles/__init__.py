"""Patterns as lists of the tiles that hold any pair, run by a dense kernel tile by tile.

Imports kernels' own files, spec and the ground.
Public: nothing.
"""
