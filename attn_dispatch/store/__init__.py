"""Files of the cache folder: decisions, quarantine, crash markers, missed problems. kernels/native adds its library.

Imports spec and the base modules.
Public: nothing.
"""
