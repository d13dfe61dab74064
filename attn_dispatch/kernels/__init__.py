"""Parts of backends: the contract, the registry, declared limits, and the dense kernels.

Imports spec, machine and the base modules. Its rooms (branches, tiles, triton, native, flex) do not import each other.
Public: merge, register.
"""
