"""What this machine is and what it has free: processors, devices, memory, installed software.

Imports the ground only.
Public: hardware.
"""
