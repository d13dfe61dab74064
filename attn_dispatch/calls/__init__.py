"""From a call to its results: rewriters make other calls of it, until each is one problem, which has a route.

Imports ring and what it imports.
Public: nothing.
"""
