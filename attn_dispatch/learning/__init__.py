"""Predictions for sizes that were never measured, from measured neighbours; thresholds of orders; regret.

Imports tuning, store, spec and the base modules.
Public: nothing.
"""
