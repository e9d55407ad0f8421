"""On the path of the processes that tests start: torch's compiler is loaded by those that compile, and by no other.

Each optimizer imports torch._dynamo, to have itself left out of what that compiles, and so doubles the seconds that a
process takes to start. Until something else is asked of it, the module here is an empty one of that name: what it has
not been loaded for, it cannot compile, and nothing has to be left out.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


class Unloaded(ModuleType):
    """Has what optimizers ask for; whatever else is asked for loads it."""

    def graph_break(self, *given: Any) -> None:
        pass

    def disable(self, function: Callable[..., Any], *given: Any, **named: Any) -> Callable[..., Any]:
        left_out: list[Callable[..., Any]] = []

        @functools.wraps(function)
        def called(*arguments: Any, **keywords: Any) -> Any:
            if type(self) is Unloaded:
                return function(*arguments, **keywords)
            if not left_out:
                left_out.append(self.disable(function, *given, **named))
            return left_out[0](*arguments, **keywords)

        return called

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__spec__.loader.load(self)  # type: ignore[union-attr]
        return getattr(self, name)


class Late(Loader):
    """Loads a module when `load` says so."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._lock = threading.RLock()
        self._loads = False

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Unloaded(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass

    def load(self, module: ModuleType) -> None:
        with self._lock:
            if self._loads:
                raise AttributeError(f"{module.__name__} is being loaded")
            if type(module) is Unloaded:
                self._loads = True
                self._loader.exec_module(module)
                module.__class__ = ModuleType
                self._loads = False


class Loaded(Loader):
    """Of a part that came with the whole."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass


class Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == COMPILER:
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = Late(spec.loader)
            return spec
        whole = sys.modules.get(COMPILER)
        if name.startswith(f"{COMPILER}.") and type(whole) is Unloaded:
            late: Any = whole.__spec__.loader  # type: ignore[union-attr]
            if not late._loads:
                late.load(whole)
                if name in sys.modules:
                    return spec_from_loader(name, Loaded())
        return None


sys.meta_path.insert(0, Finder())
