"""The forward and backward pass over a sequence on many ranks: attention problems, messages, merged results.

Imports ring/rows, kernels, spec and the base modules.
Public: nothing.
"""
