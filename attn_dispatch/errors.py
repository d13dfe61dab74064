"""The package's exceptions, as one tree.

Exception
  AttnDispatchError
    InvalidInput        an argument is wrong (also a ValueError)
    NoBackend           no backend can run this problem; the message holds every reason
    BackendFailed       the backend that was chosen or forced raised, or broke its contract
    NotDecided          ATTN_DISPATCH_MODE=locked and this problem has no stored decision
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
    """A problem has no stored decision, and ATTN_DISPATCH_MODE is locked."""


class GroupMismatch(AttnDispatchError):
    """The ranks of a mesh disagree on shapes, dtypes or versions."""


class RankLost(AttnDispatchError):
    """Another rank of the mesh exited, hung or did not join within the process group's time-out."""
