"""Which layers ask for an attention implementation of transformers; a model where none does ignores it, and raises.

A layer that asks names an AttentionInterface in its code. One that computes a softmax itself (LongT5's local attention,
vision towers of SAM) goes on as it was, whatever is set; where others ask, a warning names it once.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from traceback import walk_stack
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from attn_dispatch.errors import InvalidInput
from attn_dispatch.integrations.libraries import library
from attn_dispatch.log import say_once

transformers = library("transformers", "5.4")

Request = str | dict[str, Any] | None  #: what set_attn_implementation() takes
SDPA = "scaled_dot_product_attention"
NOT_OF_MODELS = ("torch.", "builtins", "transformers.modeling_", "transformers.generation", "transformers.utils")
EAGER = "'eager'"
MARK = "_attn_dispatch_configs"  #: attribute of a model that is being made: configs that name the implementation


class Part(NamedTuple):
    """What stands below one config of a model.

    Args:
        asking: types of layers that ask for an implementation.
        own: a model's type, and that of a layer in it that computes attention itself.
    """

    config: Any
    asking: set[type]
    own: set[tuple[type, type]]

    @property
    def is_ignorant(self) -> bool:
        return bool(self.own) and not self.asking


def refuse_models(name: str) -> None:
    """Let models that ignore the implementation `name` raise where it is set, and where they are made with it."""
    model = transformers.PreTrainedModel
    model.set_attn_implementation = _checked_setter(model.set_attn_implementation, name)
    model.get_correct_attn_implementation = _postponed_choice(model.get_correct_attn_implementation, name)
    model.post_init = _checked_end(model.post_init, name)


def _checked_setter(setter: Callable[..., None], name: str) -> Callable[..., None]:
    @wraps(setter)
    def set_attn_implementation(self: Any, attn_implementation: Request, *args: Any, **more: Any) -> None:
        named = [config for config, asked in _configs_of(self.config, attn_implementation) if asked == name]
        parts = _named_parts(self, named)
        models = [x for x in self.modules() if isinstance(x, transformers.PreTrainedModel)]
        asking = [x for x in models if any(part.asking and part.config is x.config for part in parts)]
        if fixed := {type(x) for x in asking if not x._can_set_attn_implementation()}:
            how = f"load the model with attn_implementation={name!r}"
            raise InvalidInput(f"{_and(fixed)} cannot change it later: {how}")
        _refuse_ignorant(parts, name)
        before = [(part.config, part.config._attn_implementation) for part in parts if part.is_ignorant]
        setter(self, attn_implementation, *args, **more)
        for config, implementation in before:  # its layers take that one's masks
            config._attn_implementation_internal = implementation
        known = [config for config, _ in _configs_of(self.config, None)]
        for part in parts_of(self):  # a copy that no model has (X-CLIP's of its frames) is not reached
            own, implementation = self.config._attn_implementation, part.config._attn_implementation
            if part.asking and not _is_in(part.config, known) and name in (own, implementation):
                part.config._attn_implementation_internal = own

    return set_attn_implementation


def _postponed_choice(choice: Callable[..., str], name: str) -> Callable[..., str]:
    """A model is made with transformers' own choice: its classes of layers may be those of a table by name."""

    @wraps(choice)
    def get_correct_attn_implementation(
        self: Any, requested_attention: str | None, is_init_check: bool = False, **more: Any
    ) -> str:
        configs = (config for config, _ in _configs_of(self.config, None)) if is_init_check else ()
        named = [config for config in configs if config._attn_implementation == name]
        if named:
            self.__dict__[MARK] = named
        if named and requested_attention == name and type(self).__module__.startswith("transformers."):
            requested_attention = None
        return choice(self, requested_attention, is_init_check, **more)

    return get_correct_attn_implementation


def _checked_end(end: Callable[..., None], name: str) -> Callable[..., None]:
    """What was postponed, as soon as all layers are there."""

    @wraps(end)
    def post_init(self: Any) -> None:
        end(self)
        marked = [part for part in self.modules() if MARK in part.__dict__]
        if not marked or _is_part_of_another(self):
            return
        named = [config for part in marked for config in part.__dict__.pop(MARK)]
        parts = _named_parts(self, named)
        _refuse_ignorant(parts, name)
        ignorant = [part.config for part in parts if part.is_ignorant]
        for config in [*named, *(part.config for part in parts)]:
            if not _is_in(config, ignorant):
                config._attn_implementation_internal = name

    return post_init


def _is_part_of_another(model: Any) -> bool:
    """Whether a method of another model makes it."""
    callers = (frame.f_locals.get("self") for frame, _ in walk_stack(sys._getframe()))
    return any(isinstance(x, transformers.PreTrainedModel) and x is not model for x in callers)


def _configs_of(config: Any, request: Request) -> Iterator[tuple[Any, Request]]:
    """The configs of a model and its parts, each with the implementation that a request names for it."""
    yield config, request.get("") if isinstance(request, dict) else request
    for key in config.sub_configs:
        if (part := getattr(config, key, None)) is not None:
            yield from _configs_of(part, request.get(key) if isinstance(request, dict) else request)


def _named_parts(model: Any, named: list[Any]) -> list[Part]:
    """Those of `named` configs; a copy that no config holds (those of T5's stacks) follows the model's own."""
    known = [config for config, _ in _configs_of(model.config, None)]
    copied = _is_in(model.config, named)
    return [x for x in parts_of(model) if _is_in(x.config, named) or (copied and not _is_in(x.config, known))]


def _is_in(config: Any, configs: list[Any]) -> bool:
    return any(config is each for each in configs)  # == compares what they hold


def parts_of(model: nn.Module) -> list[Part]:
    """The layers of a model by the config that is theirs, or that of the next module around them."""
    found: dict[int, Part] = {}

    def visit(module: nn.Module, config: Any, around: type) -> None:
        own = getattr(module, "config", None)
        config = own if isinstance(own, transformers.PreTrainedConfig) else config
        around = type(module) if isinstance(module, transformers.PreTrainedModel) else around
        part = found.setdefault(id(config), Part(config, set(), set()))
        if asks(type(module)):
            part.asking.add(type(module))
        elif "Attention" in type(module).__name__ and any(_methods(type(module))):
            part.own.add((around, type(module)))
        for child in module.children():
            visit(child, config, around)

    visit(model, None, type(model))
    own = {layer for part in found.values() for _, layer in part.own}
    if any(part.asking for part in found.values()) or any(map(_has_softmax, own)):
        for part in found.values():  # others hold layers, or are linear
            part.own.intersection_update(pair for pair in part.own if _has_softmax(pair[1]))
    return [part for part in found.values() if part.config is not None]


# --- what the code of a layer names ---------------------------------------------------------------------------


def asks(layer: type) -> bool:
    """Whether a layer's methods, or functions that they call, name an AttentionInterface."""
    return any(isinstance(value, transformers.AttentionInterface) for value in _names(layer).values())


def _has_softmax(layer: type) -> bool:
    return any("softmax" in name.lower() or name == SDPA for name in _names(layer))


@cache
def _names(layer: type) -> dict[str, Any]:
    """All names in the code of a layer's methods and of functions of their file, with what they mean there."""
    functions: list[Any] = [inspect.unwrap(method) for method in _methods(layer)]
    found = dict[str, Any]()
    for function in functions:
        for name in _of_code(function.__code__):
            value = found[name] = function.__globals__.get(name, found.get(name))
            if isinstance(value, FunctionType) and value.__module__ == function.__module__:
                functions += {inspect.unwrap(value)}.difference(functions)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def gives(layer: type, name: str) -> bool:
    """Whether the code of a layer's methods has this text: it gives functions a keyword of that name."""
    return name in _texts(layer)


@cache
def _texts(layer: type) -> set[str]:
    found = [inspect.unwrap(method).__code__.co_consts for method in _methods(layer)]
    within = (x for consts in found for const in consts for x in (const if isinstance(const, tuple) else (const,)))
    return {x for x in within if isinstance(x, str)}


def _methods(layer: type) -> Iterator[FunctionType]:
    """Those that a layer runs; one that calls super() runs the next one, too."""
    done = set[str]()
    for base in layer.__mro__:
        methods = {} if base.__module__.startswith(NOT_OF_MODELS) else vars(base)
        for name, method in methods.items():
            if name not in done and isinstance(method, FunctionType):
                yield method
                done |= set() if "super" in inspect.unwrap(method).__code__.co_names else {name}


def _of_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _of_code(inner)


# --- what is said ---------------------------------------------------------------------------------------------


def _refuse_ignorant(parts: list[Part], name: str) -> None:
    """Raise where no layer asks but some compute; where some ask, name the others in a warning."""
    own = {pair for part in parts for pair in part.own}
    if not own:
        return
    layers, models = {layer for _, layer in own}, _and({model for model, _ in own})
    how = "attn_dispatch.replacing_sdpa() takes their calls of PyTorch's function"
    if all(SDPA not in _names(layer) for layer in layers):
        how = f"use attn_implementation={others(parts[0].config)}"
    if not any(part.asking for part in parts):
        what = f"{_and(layers)} {'does' if len(layers) == 1 else 'do'} not ask transformers' AttentionInterface"
        raise InvalidInput(f"{models} would ignore attn_implementation={name!r}, as {what}: {how}")
    how = f": {how}" if "sdpa()" in how else ""
    what = f"not served by attn_dispatch: {_and(layers)} in {models}"
    say_once(f"{what}, which compute attention themselves, as before{how}")


def _and(kinds: set[type]) -> str:
    return " and ".join(sorted({each.__name__ for each in kinds}))


def others(config: Any) -> str:
    """What else the models of a config have: 'sdpa' or 'eager', or 'eager' alone."""
    return EAGER if has_eager_alone(type(config)) else f"'sdpa' or {EAGER}"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_eager_alone(config: type) -> bool:
    """Whether there are models of a config, none with sdpa."""
    models: list[Any] = [transformers.PreTrainedModel]
    for model in models:
        models += model.__subclasses__()
    mine = [model for model in models if getattr(model, "config_class", None) is config]
    return bool(mine) and not any(model._supports_sdpa for model in mine)
