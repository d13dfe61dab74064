"""Decisions shipped with the package: one JSON file per silicon, as `profile --share` writes it.

Holds no code.
Public: nothing.
"""
