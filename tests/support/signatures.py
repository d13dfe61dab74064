"""Signatures of other people's functions, without importing them: from source text, from schemas of ops."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
from inspect import Parameter, Signature
from typing import Any

import torch


def of_source(text: str, name: str) -> Signature:
    """The signature of a module's function by its source; defaults are only known to exist.

    Raises:
        LookupError: the module has no such function.
    """
    found = next(
        (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name), None
    )
    if found is None:
        raise LookupError(f"no function {name}")
    named, args = [], found.args
    without = len(args.posonlyargs) + len(args.args) - len(args.defaults)
    for number, each in enumerate([*args.posonlyargs, *args.args]):
        kind = Parameter.POSITIONAL_ONLY if number < len(args.posonlyargs) else Parameter.POSITIONAL_OR_KEYWORD
        named.append(Parameter(each.arg, kind, default=Parameter.empty if number < without else None))
    for each, default in zip(args.kwonlyargs, args.kw_defaults):
        named.append(Parameter(each.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None))
    return Signature(named)


def fields_of(text: str, name: str) -> list[str]:
    """The fields of a module's class by its source."""
    (found,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    return [
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def is_imported(text: str, name: str) -> bool:
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    return any(alias.name == name for node in nodes for alias in node.names)


def of_schema(op: Any) -> Signature:
    """The signature of an op of PyTorch, such as `torch.ops.aten.add.Tensor`."""
    found = []
    for each in op._schema.arguments:
        kind = Parameter.KEYWORD_ONLY if each.kwarg_only else Parameter.POSITIONAL_OR_KEYWORD
        default = each.default_value if each.has_default_value() else Parameter.empty
        found.append(Parameter(each.name, kind, default=default))
    return Signature(found)


def installed_source(distribution: str, path: str) -> str:
    """The text of a file of an installed distribution.

    Raises:
        PackageNotFoundError: it is not installed. FileNotFoundError: it has no such file.
    """
    file: Any = importlib.metadata.Distribution.from_name(distribution).locate_file(path)
    text: str = file.read_text(encoding="utf-8")
    return text


def names(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What each parameter is given in a call. Raises TypeError: the call does not fit."""
    return dict(signature.bind(*args, **kwargs).arguments)


def of_function(function: Any) -> Signature:
    """The signature of a function that is here, or of an op."""
    return (
        of_schema(function.default)
        if isinstance(function, torch._ops.OpOverloadPacket)
        else inspect.signature(function)
    )
