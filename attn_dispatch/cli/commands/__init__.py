"""One module per command: its description, its example, its options and what it does.

Imports cli's own files and the package.
Public: nothing.
"""
