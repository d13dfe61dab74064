"""Refuses models that would ignore an attention implementation of transformers.

Families that do not ask transformers' AttentionInterface (Falcon, Bloom) go on as they were: set_attn_implementation()
says so in a warning, and their constructors may not even do that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from torch import nn

from attn_dispatch.errors import InvalidInput
from attn_dispatch.integrations.libraries import library

transformers = library("transformers", "5.4")

Request = str | dict[str, Any] | None  #: what set_attn_implementation() takes


def refuse_models_without_it(name: str) -> None:
    """Let models that ignore the implementation `name` raise where it is set, and where they are made with it."""
    model = transformers.PreTrainedModel
    model.set_attn_implementation = _checked_setter(model.set_attn_implementation, name)
    model.get_correct_attn_implementation = _checked_choice(model.get_correct_attn_implementation, name)


def _checked_setter(setter: Callable[..., None], name: str) -> Callable[..., None]:
    @wraps(setter)
    def set_attn_implementation(self: Any, attn_implementation: Request, *args: Any, **more: Any) -> None:
        named = list(_configs_of(self.config, attn_implementation, name))
        models = [part for part in self.modules() if isinstance(part, transformers.PreTrainedModel)]
        if attn_implementation != name:
            models = [part for part in models if any(part.config is config for config in named)]
        fixed = [type(part) for part in models if not part._can_set_attn_implementation()]
        if fixed:
            raise InvalidInput(_message(fixed, name))
        setter(self, attn_implementation, *args, **more)

    return set_attn_implementation


def _checked_choice(choice: Callable[..., str], name: str) -> Callable[..., str]:
    @wraps(choice)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **more: Any) -> str:
        if requested_attention == name and not asks_for_attention(type(self)):
            raise InvalidInput(_message([type(self)], name))
        return choice(self, requested_attention, *args, **more)

    return get_correct_attn_implementation


def _configs_of(config: Any, request: Request, name: str) -> Iterator[Any]:
    """The configs, of a model and its parts, for which a request names the implementation."""
    if (request.get("") if isinstance(request, dict) else request) == name:
        yield config
    for key in config.sub_configs:
        part = request.get(key) if isinstance(request, dict) else request
        if getattr(config, key, None) is not None and part is not None:
            yield from _configs_of(getattr(config, key), part, name)


def asks_for_attention(model: type) -> bool:
    """Whether the attention layers that stand beside a model's class, if any, can ask an AttentionInterface."""
    kinds = [x for x in vars(sys.modules[model.__module__]).values() if isinstance(x, type)]
    beside = [x for x in kinds if issubclass(x, nn.Module) and x.__module__ == model.__module__]
    beside = [x for x in beside if "Attention" in x.__name__]
    homes = {base.__module__ for layer in beside for base in layer.__mro__}
    return not beside or any(
        isinstance(x, transformers.AttentionInterface) for home in homes for x in vars(sys.modules[home]).values()
    )


def _message(models: list[type], name: str) -> str:
    names = " and ".join(sorted({model.__name__ for model in models}))
    if all(map(asks_for_attention, models)):
        return f"{names} cannot change it later: load the model with attn_implementation={name!r}"
    return (
        f"{names} would ignore attn_implementation={name!r}, as the attention layers do not ask transformers' "
        "AttentionInterface. Call the model under attn_dispatch.replacing_sdpa(), if it calls PyTorch's function; "
        f"or name parts that have the interface: set_attn_implementation({{'text_config': {name!r}}})"
    )
