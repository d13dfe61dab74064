"""The page of `attn-dispatch report`: what decisions say beside each other, its plots, and its HTML.

Imports the files of cli/, and what they import.
Public: nothing.
"""
