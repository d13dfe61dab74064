"""What backends are made of: their contract, their registry, their declared limits, and the dense kernels.

Imports spec, machine and the ground. Of its rooms (branches, tiles, triton, native, flex) none imports another.
Public: register.
"""
