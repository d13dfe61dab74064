"""One module per command: its description, examples, options and `run`.

Imports cli's own files and the package.
Public: nothing.
"""
