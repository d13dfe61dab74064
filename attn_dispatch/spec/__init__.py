"""Description of a call: patterns, token orders, and one checked `Problem` for each call.

Imports errors and the other base modules only.
Public: Dense, Dilated, Neighborhood, Window, Problem, Reordered, from_order, positions, to_order.
"""
