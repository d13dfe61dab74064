"""Parts of backends: the contract, the registry, declared limits, and the dense kernels.

Imports spec, machine and the ground. Its subpackages (branches, tiles, triton, native, flex) do not import each other.
Public: register.
"""
