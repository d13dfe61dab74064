"""What can go wrong, as one tree.

Exception
  AttnDispatchError
    InvalidInput        an argument is wrong (also a ValueError)
    NoBackend           no backend can run this problem; the message holds every reason
    BackendFailed       the backend that was chosen or forced raised, or broke its contract
    NotDecided          ATTN_DISPATCH_MODE=locked and this problem has no stored decision
    GroupMismatch       the ranks of a mesh do not agree on the call
    RankLost            a rank of the mesh died, hung or was not there in time
"""


class AttnDispatchError(Exception):
    """Base of every error that attn_dispatch raises on purpose."""


class InvalidInput(AttnDispatchError, ValueError):
    """An argument is wrong: the message names it, what it was and what it may be."""


class NoBackend(AttnDispatchError):
    """No backend accepts the problem; the message lists each one's reasons."""


class BackendFailed(AttnDispatchError):
    """A backend raised, or returned something other than its contract says."""


class NotDecided(AttnDispatchError):
    """Locked mode met a problem without a stored decision."""


class GroupMismatch(AttnDispatchError):
    """The ranks of a mesh disagree on shapes, dtypes or versions."""


class RankLost(AttnDispatchError):
    """Another rank of the mesh died, hung or did not take part within the process group's time-out."""
