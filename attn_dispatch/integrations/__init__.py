"""attend() as the attention of other libraries: a module each, imported where that library is used.

Imports the functions that users call, and what they import; and the library.
Public: the modules' names, and `transformers.register`.
"""
