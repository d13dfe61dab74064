"""This machine: processors, devices, available memory, installed software.

Imports the base modules only.
Public: hardware.
"""
