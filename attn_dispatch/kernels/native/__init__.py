"""The CPU kernel in C++, compiled for this machine when it is first used, or by whoever built the wheel.

Imports kernels' own files, spec, machine and the base modules.
Public: nothing.
"""
