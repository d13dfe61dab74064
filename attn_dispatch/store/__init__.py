"""What is remembered on disk: decisions, quarantine, crash markers, recorded problems. Nobody else writes there.

Imports spec and the ground.
Public: nothing.
"""
