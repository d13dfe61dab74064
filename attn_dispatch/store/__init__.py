"""Files on disk: decisions, quarantine, crash markers, missed problems. kernels/native apart, no other room writes any.

Imports spec and the base modules.
Public: nothing.
"""
