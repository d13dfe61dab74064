"""From a problem to the backend and order that run it: stored, learned, measured, static or forced.

Imports learning, tuning and what they import.
Public: Explanation, counters.
"""
