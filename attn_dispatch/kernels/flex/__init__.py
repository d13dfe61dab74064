"""Patterns as block masks and score_mod functions for FlexAttention.

Imports kernels' own files, spec, machine and the base modules.
Public: nothing.
"""
