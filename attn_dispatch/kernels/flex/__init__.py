"""Patterns as block masks and score modifications for FlexAttention.

Imports kernels' own files, spec, machine and the ground.
Public: nothing.
"""
