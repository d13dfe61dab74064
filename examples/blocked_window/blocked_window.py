"""Sliding windows in blocks of queries, each with the keys that it sees: a backend of attn-dispatch."""

import torch

from attn_dispatch import Window
from attn_dispatch.kernels import contract

name = "blocked_window"
BLOCK = 128  # queries


def version():
    return f"1.0, torch {torch.__version__}"


def refusals(problem):
    found = contract.refuse_pattern(problem, (Window,)) + contract.refuse_dtype(problem, (torch.float32,))
    found += contract.refuse_sinks(problem) + contract.refuse_dropout(problem) + contract.refuse_ranks(problem)
    if problem.masked or problem.q_len != problem.k_len:
        found.append(contract.Refusal("masks", f"needs q_len == k_len without masks, not {problem}"))
    return found


def workspace_bytes(problem):  # about six tensors as large as the scores, and k and v for every query head
    scores = problem.batch * problem.heads * problem.q_len * problem.k_len
    return 6 * (scores + 2 * problem.batch * problem.heads * problem.k_len * problem.head_dim) * problem.dtype.itemsize


def run(q, k, v, problem, **tensors):
    k, v = (x.repeat_interleave(problem.heads // problem.kv_heads, dim=2) for x in (k, v))
    left, right = (problem.q_len if side is None else side for side in (problem.pattern.left, problem.pattern.right))
    at, parts = torch.arange(problem.q_len, device=q.device), []
    for rows in at.split(BLOCK):
        keys = slice(max(0, int(rows[0]) - left), int(rows[-1]) + right + 1)
        distance = at[keys] - rows[:, None]
        scores = torch.einsum("bqhd,bkhd->bhqk", q[:, rows] * problem.scale, k[:, keys])
        scores = scores.masked_fill((distance < -left) | (distance > right), -torch.inf)
        parts.append((torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v[:, keys]), scores.logsumexp(-1)))
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)
