"""Which rows lie on which rank, and which rows a rank needs of the others.

Imports spec and the ground.
Public: nothing.
"""
