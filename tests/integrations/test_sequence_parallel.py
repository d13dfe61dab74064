"""DeepSpeed, context_parallel and FSDP2 with attend(): on two ranks what one process computes, or refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from attn_dispatch import Dense, Dilated, InvalidInput, Window, attend
from attn_dispatch.integrations.deepspeed import LocalAttention
from attn_dispatch.integrations.unmasked import heads_of
from attn_dispatch.spec.pattern import Pattern
from tests.support import ring_ranks
from tests.support.pairwise import crossed

pytestmark = [pytest.mark.usefixtures("little_time", "no_trials", "_processes"), pytest.mark.filterwarnings("ignore")]

WORLD, BATCH, LENGTH, HEAD_DIM = 2, 2, 32, 8
PATTERNS: dict[str, Pattern] = {
    "dense": Dense(),
    "causal": Dense(is_causal=True),
    "window": Window(5, 0),
    "dilated": Dilated((8, 16), (1, 2), is_causal=True),
    "dilated by rows": Dilated((8, 16), (1, 1), is_causal=True),
    "split": Dilated((8, 16), (1, 2), is_causal=True, heads="split"),
}
HEADS = {"heads": (4, 4), "grouped": (4, 2), "few": (6, 2), "uneven": (6, 3)}


def needs(*names: str) -> None:
    """Skip where a library is missing; without importing it, which takes seconds and warns."""
    for name in names:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install {name}")


def everywhere(job: Callable[..., Any], *args: Any) -> list[Any]:
    return ring_ranks.ranks_of(WORLD).everywhere(job, *args)


# --- in a rank --------------------------------------------------------------------------------------------------------


@cache
def deepspeed(name: str) -> Any:
    """A module of the library, which is initialised over the ranks."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # What its own launcher sets; the process group is there.
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(dist.get_rank()))
    library = import_module("deepspeed")
    for operator in library.ops.__compatible_ops__:
        library.ops.__compatible_ops__[operator] = False  # it would compile some, for a minute
    library.init_distributed("gloo", verbose=False)
    return import_module(f"deepspeed.{name}")


def whole(heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """q, k, v and a gradient, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(BATCH, LENGTH, count, HEAD_DIM) for count in (heads, kv_heads, kv_heads, heads)]
    return tuple(torch.randn(size, generator=generator).double() for size in sizes)


def exact(pattern: Pattern, heads: tuple[int, int], **arguments: Any) -> list[Tensor]:
    """out and gradients of one process."""
    *inputs, grad = whole(*heads)
    q, k, v = (x.requires_grad_() for x in inputs)
    out = attend(q, k, v, pattern, backend="manual", **arguments)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def of_heads(pattern: Pattern, heads: tuple[int, int], first: bool, arguments: dict[str, Any]) -> list[float]:
    """A job: errors of out, dq, dk and dv, of the heads that DeepSpeed deals to this rank and the whole sequence, as
    DistributedAttention calls it. `first`: the sequence is the first axis.
    """
    own, each = torch.arange(heads[1]).tensor_split(WORLD)[dist.get_rank()], heads[0] // heads[1]
    kv = slice(int(own[0]), int(own[-1]) + 1)
    mine = slice(kv.start * each, kv.stop * each)
    parts = [x[:, :, some] for x, some in zip(whole(*heads), (mine, kv, kv, mine))]
    *given, grad = (x.transpose(0, 1) if first else x for x in parts)
    q, k, v = (x.contiguous().requires_grad_() for x in given)
    out = LocalAttention(pattern, dist.group.WORLD, int(first), **arguments)(q, k, v)
    found = [x.transpose(0, 1) if first else x for x in (out, *torch.autograd.grad(out, (q, k, v), grad))]
    expected = zip(exact(pattern, heads, **arguments), (mine, mine, kv, kv))
    return [float((x - y[:, :, some]).abs().max()) for x, (y, some) in zip(found, expected)]


def refusal(pattern: Pattern | None, group: bool, args: tuple[Any, ...], arguments: dict[str, Any]) -> str:
    """A job: the message with which a call is refused."""
    q, k, v, _ = whole(2, 2)
    try:
        LocalAttention(pattern, dist.group.WORLD if group else None, **arguments)(q, k, v, *args)
    except InvalidInput as error:
        return str(error)
    return ""


# --- DistributedAttention ---------------------------------------------------------------------------------------------


@crossed(pattern=PATTERNS, heads=HEADS, first=(False, True))
def test_two_ranks_compute_what_one_does(pattern: str, heads: str, first: bool) -> None:
    for errors in everywhere(of_heads, PATTERNS[pattern], HEADS[heads], first, {}):
        assert max(errors) < 1e-9


def test_more_arguments() -> None:
    """Masks of the whole sequence, and slopes of all heads."""
    mask = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.8
    slopes = torch.linspace(0.1, 0.7, 4, dtype=torch.float64)
    documents = (torch.arange(LENGTH) >= 13).long().expand(BATCH, -1)
    for pattern, arguments in (
        (Dense(), {"key_mask": mask}),
        (Dense(is_causal=True), {"alibi_slopes": slopes, "softcap": 3.0}),
        (Dense(is_causal=True), {"documents": documents}),
        (Window(4, 0), {"sink": torch.linspace(-1, 1, 4, dtype=torch.float64), "scale": 0.3}),
    ):
        for errors in everywhere(of_heads, pattern, (4, 4), False, arguments):
            assert max(errors) < 1e-9


REFUSED: dict[str, tuple[Any, ...]] = {
    "a mask by position": (Dense(), True, (torch.ones(1, 1, 32, 32),), {}, "takes no mask by position, got Tensor"),
    "heads that are not known": (PATTERNS["dilated"], False, (), {}, "differs by head: give LocalAttention the group"),
    "rates as numbers": (None, False, (), {"segment_lengths": (8,), "dilation_rates": (2,)}, "differs by head"),
    "slopes of some heads": (Dense(), True, (), {"alibi_slopes": torch.ones(3)}, "must have all 4 heads, got [3]"),
    "a layout": (Dense(), True, (), {"layout": "bhnd"}, "layout cannot be given to LocalAttention"),
    "another axis": (Dense(), True, (), {"batch_dim_idx": 2}, "batch_dim_idx must be 0 or 1, got 2"),
}


@pytest.mark.parametrize(("pattern", "group", "args", "arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(pattern: Any, group: bool, args: Any, arguments: dict[str, Any], message: str) -> None:
    for found in everywhere(refusal, pattern, group, args, arguments):
        assert message in found


# --- transformers' models: ALST, context_parallel, FSDP2 --------------------------------------------------------------

TOKENS = 40
NAME = "attn_dispatch"


@cache
def transformers() -> Any:
    import_module("attn_dispatch.integrations.transformers")
    found = import_module("transformers")
    found.logging.set_verbosity_error()
    return found


def model_of(kind: str, **more: Any) -> Any:
    """A decoder with the same random weights on every rank."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
    torch.manual_seed(0)
    config = getattr(transformers(), f"{kind}Config")(**{**sizes, **heads, **more})
    model = getattr(transformers(), f"{kind}ForCausalLM")(config).double()
    model.set_attn_implementation(NAME)
    return model


def ids_of(batch: int) -> Tensor:
    return torch.randint(3, 99, (batch, TOKENS), generator=torch.Generator().manual_seed(1))


def logits_and_grads(model: Any, ids: Tensor, **given: Any) -> tuple[Tensor, list[Tensor]]:
    """Of a loss that is a sum over tokens, so that ranks' gradients add up."""
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False, **given).logits
    logits.square().sum().backward()
    return logits.detach(), [x.grad.clone() for x in model.parameters()]


def summed(grads: list[Tensor]) -> list[Tensor]:
    for each in grads:
        dist.all_reduce(each)
    return grads


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error, relative to the largest entry of all."""
    most = max(float(x.abs().max()) for x in expected)
    return max(float((x - y).abs().max()) for x, y in zip(found, expected, strict=True)) / most


def by_alst(kind: str, more: dict[str, Any], spread: Any, cuts: tuple[int, ...]) -> tuple[float, float]:
    """A job: errors of logits and gradients. `cuts`: the lengths of documents in a row."""
    model, ids = model_of(kind, **more), ids_of(1)
    if spread is not None:
        model.config.attn_dispatch = spread
    positions = torch.cat([torch.arange(count) for count in cuts])[None]
    expected, exact_grads = logits_and_grads(model, ids, position_ids=positions)
    if len(cuts) > 1:  # the reference itself keeps them apart
        first, rest = (model(input_ids=x, use_cache=False).logits for x in torch.split(ids, list(cuts), 1))
        assert worst([expected], [torch.cat([first, rest], 1).detach()]) < 1e-9
    functions = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    ulysses = deepspeed("runtime.sequence_parallel.ulysses_sp")
    shares = deepspeed("runtime.sequence_parallel.parallel_state_sp")
    try:
        ulysses.UlyssesSPAttentionHF.register_with_transformers(model, NAME, WORLD, 1)
        own = [x.chunk(WORLD, 1)[dist.get_rank()].contiguous() for x in (ids, positions)]
        logits, grads = logits_and_grads(model, own[0], position_ids=own[1])
    finally:
        functions._local_mapping.pop(NAME, None)
        shares._release_sequence_parallel_groups()
    return worst([logits], [expected.chunk(WORLD, 1)[dist.get_rank()]]), worst(summed(grads), exact_grads)


SPREAD = {"segment_lengths": [8, 16], "dilation_rates": [1, 2]}
WHOLE, PACKED = (TOKENS,), (27, 13)
MODELS: dict[str, tuple[str, dict[str, Any], Any, tuple[int, ...]]] = {
    "llama": ("Llama", {}, None, WHOLE),
    "llama, packed": ("Llama", {}, None, PACKED),
    "mistral with a window": ("Mistral", {"sliding_window": 6}, None, WHOLE),
    "mistral with a window, packed": ("Mistral", {"sliding_window": 6}, None, PACKED),
    "llama, dilated": ("Llama", {"num_attention_heads": 6, "hidden_size": 48}, SPREAD, WHOLE),
}


@pytest.mark.parametrize("name", MODELS)
def test_alst(name: str) -> None:
    needs("transformers", "deepspeed")
    for logits, grads in everywhere(by_alst, *MODELS[name]):
        assert max(logits, grads) < 1e-9


def in_context_parallel(
    kind: str, more: dict[str, Any], hooked: bool, cuts: tuple[int, ...]
) -> tuple[float, float] | str:
    """A job: errors of logits and gradients inside torch's context_parallel, or the message of a refusal.

    `hooked`: with accelerate's hooks, which drop masks; its own context manager is torch's, and does not run on CPUs.
    """
    experimental = import_module("torch.distributed.tensor.experimental")
    model, ids, rank = model_of(kind, **more), ids_of(2), dist.get_rank()
    expected, exact_grads = logits_and_grads(model, ids)
    if hooked:
        import_module("accelerate.big_modeling")._attach_context_parallel_hooks(model)
    positions = torch.cat([torch.arange(count) for count in cuts])[None].repeat(2, 1)
    own, mask = ids.clone(), torch.ones_like(ids)
    mesh = mesh_of_ranks()
    try:
        with experimental.context_parallel(
            mesh, buffers=[own, positions, mask], buffer_seq_dims=[1, 1, 1], no_restore_buffers={own, positions, mask}
        ):
            logits, grads = logits_and_grads(model, own, position_ids=positions, attention_mask=mask)
    except InvalidInput as error:
        return str(error)
    chunks = expected.chunk(2 * WORLD, 1)  # an early and a late one for each rank
    here = torch.cat([chunks[rank], chunks[2 * WORLD - 1 - rank]], 1)
    return worst([logits], [here]), worst(summed(grads), exact_grads)


@cache
def mesh_of_ranks() -> Any:
    return import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (WORLD,))


@pytest.mark.parametrize(
    ("kind", "more", "hooked"),
    [("Llama", {}, False), ("Llama", {}, True), ("Mistral", {"sliding_window": 6}, False)],
    ids=["llama", "llama with accelerate's hooks", "mistral with a window"],
)
def test_context_parallel(kind: str, more: dict[str, Any], hooked: bool) -> None:
    needs("transformers")
    if hooked:
        needs("accelerate")
    for errors in everywhere(in_context_parallel, kind, more, hooked, WHOLE):
        assert max(errors) < 1e-9


@pytest.mark.parametrize("hooked", [False, True], ids=["masks", "accelerate's hooks"])
@pytest.mark.parametrize("cuts", [(20, 20), (27, 13), (10, 10, 10, 10)], ids=str)
def test_packed_rows_are_refused_in_context_parallel(cuts: tuple[int, ...], hooked: bool) -> None:
    """Also where documents end with ranks' parts; positions that each rank counts from 0 are refused so, too."""
    needs("transformers")
    if hooked:
        needs("accelerate")
    found = everywhere(in_context_parallel, "Llama", {}, hooked, cuts)
    assert any("position_ids must be those of this rank's tokens in one whole sequence" in each for each in found)


def in_fsdp(checkpointed: bool) -> tuple[float, float]:
    """A job: errors of logits and gradients of a model whose parameters are sharded."""
    fsdp = import_module("torch.distributed.fsdp")
    ids = ids_of(2)
    expected, exact_grads = logits_and_grads(model_of("Llama").train(), ids)
    model = model_of("Llama").train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in (*model.model.layers, model):
        fsdp.fully_shard(layer, mesh=mesh_of_ranks())
    logits, grads = logits_and_grads(model, ids)
    sharded: list[Any] = list(grads)  # the mean over ranks, of the same batch
    return worst([logits], [expected]), worst([x.full_tensor() for x in sharded], exact_grads)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_fsdp2(checkpointed: bool) -> None:
    needs("transformers")
    for logits, grads in everywhere(in_fsdp, checkpointed):
        assert max(logits, grads) < 1e-9


def test_a_share_of_the_heads_of_an_unknown_rank_is_refused() -> None:
    """As in a tensor parallel model, where patterns that differ by head would silently go by the wrong heads."""
    module = SimpleNamespace(config=SimpleNamespace(num_attention_heads=6))
    assert heads_of(module, 3, PATTERNS["dilated by rows"]) == heads_of(module, 6, PATTERNS["dilated"]) == {}
    with pytest.raises(InvalidInput, match="differs by head, but the layer has 3 of 6 heads, not known which"):
        heads_of(module, 3, PATTERNS["dilated"])
