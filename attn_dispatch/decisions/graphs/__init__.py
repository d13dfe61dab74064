"""attend() in graphs: one operator of torch.library, its patterns as numbers, its floating-point operations.

Imports decisions' own files and what they import.
Public: nothing.
"""
