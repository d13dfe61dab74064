"""Sizes that were never measured: predictions from measured neighbours, thresholds of orders, regret.

Imports tuning, store, spec and the ground.
Public: nothing.
"""
