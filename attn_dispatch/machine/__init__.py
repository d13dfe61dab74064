"""This machine: processors, devices, available memory, installed software.

Imports the ground only.
Public: hardware.
"""
