"""attend() as the attention of other libraries: a module each, imported where that library is used.

Imports compat, and what it imports; and the library.
Public: the modules' names, `transformers.register` and `diffusers.neighborhood`.
"""
