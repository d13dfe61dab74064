"""Tests for backends of other packages, without pytest: problems, float64 results, all checks in one call.

Imports the functions that users call, and what they import.
Public: `conformance`, `Conformance`, `oracle`, `problems`, `random_problems`.
"""

from attn_dispatch.testing.cases import problems
from attn_dispatch.testing.checks import Conformance, conformance
from attn_dispatch.testing.drawn import random_problems
from attn_dispatch.testing.expected import oracle

__all__ = ["Conformance", "conformance", "oracle", "problems", "random_problems"]
