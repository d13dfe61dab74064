"""The passes over a sequence on many ranks: parts of the work, the exchange of rows, partial sums.

Imports ring/rows, kernels, spec and the ground.
Public: nothing.
"""
