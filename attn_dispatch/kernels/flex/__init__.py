"""Patterns as block masks and score modifications for FlexAttention.

Imports kernels' own files, spec and the ground.
Public: nothing.
"""
