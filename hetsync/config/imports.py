"""What a recipe names by its import path, and calls with options."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, get_type_hints

from hetsync.config.checks import expected, fits
from hetsync.errors import UserError, announce, brief
from hetsync.launchers import first_rank


def import_object(key: str, path: str) -> Any:
    """The object at `package.module:name`; what is not HetSync's own is named on standard error before it is loaded.

    UserError where there is none, or it is Python's own: a recipe that names `os:system` runs a shell.
    """
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise UserError(f"{key} is {brief(repr(path))}: give package.module:name")
    package = module.partition(".")[0]
    _refuse_standard_library(key, path, package)
    if package != "hetsync" and first_rank():
        announce(f"{key} loads {path}")
    if os.getcwd() not in sys.path:  # console scripts do not look into the folder that they are started in
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"{key} is {brief(path)}, which cannot be imported ({brief(error)}): give package.module:name"
        ) from error
    if not callable(found):
        raise UserError(f"{key} is {path}, which is a {type(found).__name__}: name a function or class")
    _refuse_standard_library(key, path, _package_of(found))
    return found


def _refuse_standard_library(key: str, path: str, package: str) -> None:
    if package in sys.stdlib_module_names:
        raise UserError(
            f"{key} is {brief(path)}, which is of Python's standard library ({package}), where nothing is a model, data"
            " or the like: name a function or class of your own"
        )


def _package_of(function: Any) -> str:
    """Where it is defined, whatever module it is found in."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__module__", None)).partition(".")[0]


def call_with_options(
    key: str, function: Any, options: Mapping[str, Any], wanted: type, defaults: Mapping[str, Any] | None = None
) -> Any:
    """Call with a recipe's options; a wrong option is the user's mistake, said in one sentence.

    `defaults` count where the options do not say otherwise. A class whose objects are not `wanted` is not called; what
    a function returns is for the caller to check, before it is used.
    """
    if isinstance(function, type) and not issubclass(function, wanted):
        raise UserError(
            f"{key}.name is the class {_name_of(function)}, which makes no {wanted.__name__}: name one that does"
        )
    arguments = {**(defaults or {}), **options}
    given = f"{key}.options is {brief(dict(options))}"
    try:
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"{given}: {error}; see the arguments of {_name_of(function)}") from error
    for name, kind in _annotations(function).items():
        if name in options and not fits(options[name], kind):
            shown = "null" if options[name] is None else brief(options[name])
            raise UserError(f"{key}.options.{name} is {shown}: {_name_of(function)} takes {expected(kind)}")
    try:
        return function(**arguments)
    except (UserError, OSError):
        raise
    except Exception as error:
        if _package_of(function) not in ("hetsync", "torch"):
            raise  # the user's own code, which the traceback leads to
        raise UserError(f"{given}, which {_name_of(function)} does not take: {brief(error)}") from error


def _name_of(function: Any) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def _annotations(function: Any) -> Mapping[str, Any]:
    """Types of the arguments, as far as they can be told."""
    try:
        return get_type_hints(getattr(function, "__init__") if isinstance(function, type) else function)  # noqa: B009
    except (NameError, TypeError, AttributeError):
        return {}
