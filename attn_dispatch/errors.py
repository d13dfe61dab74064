"""The package's exceptions, as one tree.

Exception
  AttnDispatchError
    InvalidInput        an argument is wrong (also a ValueError)
    NoBackend           no backend can run this problem; the message holds every reason
    BackendFailed       the backend that was chosen or forced raised, or broke its contract
    NotDecided          locked mode: this problem has no stored decision, or may compile no kernel; or it is not warm
    GroupMismatch       the ranks of a mesh do not agree on the call
    RankLost            a rank of the mesh exited, hung or did not join in time
"""


class AttnDispatchError(Exception):
    """Base class of attn_dispatch's own exceptions."""


class InvalidInput(AttnDispatchError, ValueError):
    """An argument is wrong; the message names it, its value and the allowed ones."""


class NoBackend(AttnDispatchError):
    """No backend accepts the problem; the message lists each one's reasons."""


class BackendFailed(AttnDispatchError):
    """A backend raised an exception, or returned something that breaks its contract."""


class NotDecided(AttnDispatchError):
    """ATTN_DISPATCH_MODE is locked, and a problem has no stored decision, or a kernel that it may not compile."""


class GroupMismatch(AttnDispatchError):
    """The ranks of a mesh disagree on shapes, dtypes or versions."""


class RankLost(AttnDispatchError):
    """Another rank of the mesh exited, hung or did not join within the process group's time-out."""
