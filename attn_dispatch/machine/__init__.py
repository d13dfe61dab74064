"""This machine: processors, devices, available memory, installed software; processes of its own.

Imports the base modules only.
Public: hardware.
"""
