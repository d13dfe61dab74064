"""Predictions for many devices without running anything: bytes sent, peak memory, time.

Imports ring/engine and ring/rows.
Public: nothing.
"""
