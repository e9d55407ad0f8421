"""Makes what each process of a test's job costs beside its work less than half. Python imports this as it starts, where
`jobs.environment` has this folder on the path.

Optimizers of torch import its compiler, torch._dynamo, only to tell it what of theirs it is to leave alone. As long as
nobody else has loaded it there is nobody to be told; `torch.compile` works as ever. What operations make of tensors
without memory, which a fifth of torch's own import is for, only the compiler asks. And garbage is collected as ever,
but not of what torch's modules are made of: neither while torch is imported nor at the end of the process.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


def import_torch(execute: Function, module: ModuleType) -> None:
    gc.disable()
    try:
        execute(module)
    finally:
        gc.freeze()
        gc.enable()


class ForCompiler:
    """What nobody but torch's compiler needs: it is executed when that is imported."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def import_later(self, execute: Function, module: ModuleType) -> None:
        # A part of it, without which no generator of random numbers can be made.
        tell = getattr(sys.modules["torch._C"], "_set_generator_metaclass", None)
        if tell is None:  # in an older torch it is another
            execute(module)
            return
        tell(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)
        self._waiting.append(functools.partial(execute, module))

    def import_compiler(self, execute: Function, module: ModuleType) -> None:
        while self._waiting:
            self._waiting.pop()()
        execute(module)


def chosen(with_compiler: Function, without: Function) -> Function:
    @functools.wraps(with_compiler)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (with_compiler if "torch._dynamo" in sys.modules else without)(*args, **kwargs)

    return call


def import_compile(execute: Function, module: ModuleType) -> None:
    execute(module)
    theirs = module._disable_dynamo

    def _disable_dynamo(function: Function | None = None, recursive: bool = True) -> Function:
        if function is None:
            return functools.partial(_disable_dynamo, recursive=recursive)
        return chosen(theirs(function, recursive), function)

    module._disable_dynamo = _disable_dynamo


def import_optimizer(execute: Function, module: ModuleType) -> None:
    execute(module)
    theirs = module._use_grad_for_differentiable

    def _use_grad_for_differentiable(function: Function) -> Function:
        def without_compiler(self: Any, *args: Any, **kwargs: Any) -> Any:
            with module.torch.set_grad_enabled(self.defaults["differentiable"]):
                return function(self, *args, **kwargs)

        return chosen(theirs(function), without_compiler)

    module._use_grad_for_differentiable = _use_grad_for_differentiable


for_compiler = ForCompiler()
INSTEAD = {
    "torch": import_torch,
    "torch._compile": import_compile,
    "torch._dynamo": for_compiler.import_compiler,
    "torch._meta_registrations": for_compiler.import_later,
    "torch.optim.optimizer": import_optimizer,
}


class Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in INSTEAD else None
        if spec is not None and spec.loader is not None:
            execute = functools.partial(INSTEAD[fullname], spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
atexit.register(gc.freeze)  # runs last
