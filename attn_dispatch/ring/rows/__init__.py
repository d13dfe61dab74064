"""Which rows each rank has, and which rows of other ranks it needs.

Imports spec and the base modules.
Public: nothing.
"""
