"""Decisions shipped with the package: one JSON file per silicon, written by the GPU checks.

Holds no code.
Public: nothing.
"""
