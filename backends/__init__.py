"""The backends, one file each, listed in kernels/registry.py.

Imports kernels, machine, spec and the base modules, never another backend.
Public: nothing; `backend="NAME"` forces one.
"""
