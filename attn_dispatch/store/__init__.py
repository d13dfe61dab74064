"""Files on disk: decisions, quarantine, crash markers, missed problems. No other room writes to the cache folder.

Imports spec and the ground.
Public: nothing.
"""
