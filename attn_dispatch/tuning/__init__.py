"""One trial of a problem: candidates, the gate that checks their results, the race, the choice.

Imports kernels, machine, store, spec and the base modules.
Public: nothing.
"""
