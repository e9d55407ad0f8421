"""Cuts a model into blocks: the leaf calls of its traced forward.

A call of a module that holds weights or buffers begins a block, as does an operation that reads a weight itself.
Whatever else there is joins the latest block that it reads from: so no edge ever leads backwards, and what changes its
input in place mostly stays with it. Operations on the batch alone belong to no block: every rank has the batch, and
each stage repeats those it needs. But what may draw random numbers is a block even there: every module, and functions
whose name says so.

What a trace cannot keep (regions without gradients, a backward pass of one's own, buffers that are assigned) is found
by comparing it with the model, after a forward and a backward pass of both; modules that have it are one block then.

Some blocks must stay together: those that share a weight, and those between which something is changed in place.
They become one, along with all blocks on the ways between them, as else there would be a circle.
"""

from __future__ import annotations

import inspect
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import torch
from torch import fx, nn
from torch.autograd import Function
from torch.fx.proxy import ParameterProxy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from hetsync.data.random_state import seed_all, untouched
from hetsync.doubles import doubled
from hetsync.plan.graph import BATCH, Block, BlockGraph, Edge

DRAWING = ("dropout", "rand", "bernoulli", "multinomial", "poisson")  # in names of functions
WHOLE = "model"  # the block of a model that cannot be cut


@dataclass(frozen=True)
class Traced:
    """A model's forward as a graph of operations, and which block each of them belongs to.

    Attributes:
        graph: Operations; arguments of forward are its placeholders.
        block_of: Blocks of its calls; `BATCH` for what depends on the batch alone.
        fixed: Arguments that decided which way the trace went, by name: other calls must have them alike.
    """

    graph: fx.Graph
    block_of: Mapping[fx.Node, int]
    fixed: Mapping[str, Any]


@dataclass(frozen=True)
class Cut:
    """A model in blocks.

    Attributes:
        graph: Its blocks. The loss is none of them.
        traced: What they compute; None where the model is one block because its forward cannot be traced.
        opaque: Classes of modules that are not looked into, and the lines because of which; for a model that is one
            block, its own class is among them.
    """

    graph: BlockGraph
    traced: Traced | None
    opaque: Mapping[str, str]


def cut(model: nn.Module, call: inspect.BoundArguments) -> Cut:
    """Blocks of `model.forward` in the mode that the model is in (training or not).

    Args:
        model: Its weights and buffers are left as they are.
        call: Arguments of a real call: what is None, True, False or a string in it decides which way the trace goes.
            The trace is compared with the model on it.
    """
    tracer = _Tracer()
    fixed = {name: value for name, value in call.arguments.items() if value is None or isinstance(value, bool | str)}
    try:
        graph = _compared(tracer, model, fixed, call)
        blocks, block_of = _Blocks(model, graph).joined()
        if not blocks:
            raise _UncutError("nothing in its forward holds weights")
    except _UncutError as error:
        return Cut(_one_block(model), None, {**tracer.opaque, type(model).__name__: str(error)})
    return Cut(BlockGraph(blocks, _edges(graph, block_of)), Traced(graph, block_of, fixed), tracer.opaque)


class _UncutError(Exception):
    """The model cannot be cut; the message has the line, or what else is in the way."""


class _UntracedError(Exception):
    """A trace leaves out what the message says."""


class _BufferProxy(ParameterProxy):
    """Whose shape is a constant, as a parameter's is."""

    def __init__(self, tracer: fx.Tracer, node: fx.Node, name: str, buffer: torch.Tensor) -> None:
        fx.Proxy.__init__(self, node, tracer)
        self.param, self.name = buffer, name  # type: ignore[assignment]


class _Tracer(fx.Tracer):
    """Finds the finest graph: classes whose forward cannot be traced become leaves, one after the other.

    Attributes:
        strict: So do those that compute without gradients, or with a backward pass of their own: no trace has that.
    """

    def __init__(self) -> None:
        super().__init__(param_shapes_constant=True)
        self.opaque: dict[str, str] = {}
        self.strict = False
        self._leaves: set[type[nn.Module]] = set()
        self._inside: list[tuple[nn.Module, bool]] = []  # and whether they were called with gradients

    def find(self, model: nn.Module, fixed: Mapping[str, Any]) -> fx.Graph:
        for parameter in inspect.signature(model.forward).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise _UncutError(f"its forward takes {parameter}")
        while True:
            self._inside = []
            try:
                with _trial(model), torch.enable_grad(), _heard(self._own_backward):
                    return self.trace(model, dict(fixed))
            except Exception as error:
                why = str(error) if isinstance(error, _UntracedError) else type(error).__name__
                where = f"{_line_of(error)}: {why}"
                if not self._inside:
                    raise _UncutError(where) from error
                self.close(self._inside[-1][0], where)

    def close(self, module: nn.Module, why: str) -> None:
        """Look into none of its class any more. _UncutError where none was looked into."""
        if self.is_leaf_module(module, ""):
            raise _UncutError(why)
        self._leaves.add(type(module))
        self.opaque[type(module).__name__] = why

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        opaque = isinstance(m, nn.RNNBase | _BatchNorm) or type(m) in self._leaves
        return opaque or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        inside = not self.is_leaf_module(m, self.path_of_module(m))
        if inside:
            self._inside.append((m, torch.is_grad_enabled()))
        result = super().call_module(m, forward, args, kwargs)
        if inside:  # left there by an error, which asks for the innermost
            self._inside.pop()
        return result

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Buffers, too, are read anew in each call: what is computed with them is no constant."""
        found = None
        if isinstance(attr_val, torch.Tensor):
            found = next((name for name, buffer in self.root.named_buffers() if buffer is attr_val), None)
        if found is None:
            return super().getattr(attr, attr_val, parameter_proxy_cache)
        if found not in parameter_proxy_cache:
            parameter_proxy_cache[found] = self.create_proxy(
                "get_attr", found, (), {}, proxy_factory_fn=lambda node: _BufferProxy(self, node, found, attr_val)
            )
        return parameter_proxy_cache[found]

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if self.strict and kind.startswith("call_") and not torch.is_grad_enabled():
            while self._inside and not self._inside[-1][1]:  # its caller has turned gradients off
                self._inside.pop()
            raise _UntracedError("computed without gradients")
        return super().create_node(kind, *args, **kwargs)

    def _own_backward(self, values: Any) -> None:
        if self.strict and _of_trace(values):
            raise _UntracedError("has a backward pass of its own")


@contextmanager
def _heard(listener: Callable[[Any], None]) -> Iterator[None]:
    """Inside, the listener gets what functions with a backward pass of their own are called with."""
    apply = vars(Function)["apply"]

    def heard(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        listener((args, kwargs))
        return apply.__get__(None, function)(*args, **kwargs)

    Function.apply = classmethod(heard)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Function.apply = apply  # type: ignore[method-assign]


class _Blocks:
    """Takes the calls of a graph into blocks, in the order in which they run."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        self._model, self._graph = model, graph
        self._tensors = state_of(model)
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        self._begun: list[tuple[str, str, tuple[str, ...]]] = []  # name, kind, state
        self._of: dict[fx.Node, int] = {}
        for node in graph.nodes:
            self._place(node)

    def joined(self) -> tuple[tuple[Block, ...], dict[fx.Node, int]]:
        """Blocks after those that must stay together have become one, and each call's."""
        groups = self._groups()
        place = {begun: index for index, group in enumerate(groups) for begun in group}
        place[BATCH] = BATCH
        held = [{name: None for begun in group for name in self._begun[begun][2]} for group in groups]
        used = {name for names in held for name in names}
        for names in held[:1]:  # somebody must hold what forward does not use
            names.update({name: None for name in self._tensors if name not in used})
        blocks = tuple(
            _block(*self._begun[group[0]][:2], {name: self._tensors[name] for name in names})
            for group, names in zip(groups, held, strict=True)
        )
        return blocks, {node: place[begun] for node, begun in self._of.items()}

    def _place(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self._of[node] = BATCH
        elif node.op.startswith("call_"):
            state = self._state_of(node)
            latest = max((self._of[read] for read in node.all_input_nodes if read in self._of), default=BATCH)
            if state or (latest == BATCH and (node.op == "call_module" or _draws(node))):
                latest = len(self._begun)
                self._begun.append((self._name(node, state), self._kind(node), state))
            self._of[node] = latest

    def _state_of(self, node: fx.Node) -> tuple[str, ...]:
        """Names of the weights and buffers that a call reads."""
        tensors = tensors_read(self._model, node)
        return tuple(dict.fromkeys(self._names[id(tensor)] for tensor in tensors if id(tensor) in self._names))

    def _name(self, node: fx.Node, state: tuple[str, ...]) -> str:
        name = str(node.target) if node.op == "call_module" else (*state, node.name)[0]
        taken = sum(name == other or other.startswith(f"{name}@") for other, _, _ in self._begun)
        return f"{name}@{taken + 1}" if taken else name

    def _kind(self, node: fx.Node) -> str:
        return type(self._model.get_submodule(str(node.target))).__name__ if node.op == "call_module" else "function"

    def _groups(self) -> list[list[int]]:
        """Blocks that must stay together, in topological order, by first appearance where that leaves a choice.

        An edge back for each pair that must stay together makes a circle of it and of all that lies between.
        """
        flow: Any = nx.DiGraph()
        flow.add_nodes_from(range(len(self._begun)))
        flow.add_edges_from(
            (edge.source, edge.target) for edge in _edges(self._graph, self._of) if edge.source != BATCH
        )
        for together in (*self._sharing(), *self._changed_in_place()):
            for one, other in pairwise(sorted(together)):
                flow.add_edges_from([(one, other), (other, one)])
        condensed: Any = nx.condensation(flow)
        members: dict[int, list[int]] = {node: sorted(condensed.nodes[node]["members"]) for node in condensed}
        return [members[node] for node in nx.lexicographical_topological_sort(condensed, lambda node: members[node][0])]

    def _sharing(self) -> Iterable[set[int]]:
        holders = defaultdict(set)
        for number, (_, _, state) in enumerate(self._begun):
            for name in state:
                holders[name].add(number)
        return holders.values()

    def _changed_in_place(self) -> Iterator[set[int]]:
        """The block that made a value, that which changes it, and all that read it."""
        for node in self._of:
            if node.all_input_nodes and _in_place(self._model, node):
                changed = node.all_input_nodes[0]
                yield {self._of[each] for each in (changed, node, *changed.users) if self._of.get(each, BATCH) != BATCH}


def tensors_read(model: nn.Module, node: fx.Node) -> list[Any]:
    """Weights and buffers that a call reads, and constants that only the trace has."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return [*module.parameters(), *module.buffers()]
    return [_attribute(model, read) for read in node.all_input_nodes if read.op == "get_attr"]


def _draws(node: fx.Node) -> bool:
    """Whether a function's name says that it draws random numbers."""
    return any(word in _function_name(node) for word in DRAWING)


def _function_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _in_place(model: nn.Module, node: fx.Node) -> bool:
    """Torch's own ways; `+=` and its like are traced as operations that return something new."""
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    name = _function_name(node)
    return bool(node.kwargs.get("inplace")) or (name.endswith("_") and not name.endswith("__"))


def _edges(graph: fx.Graph, block_of: Mapping[fx.Node, int]) -> tuple[Edge, ...]:
    pairs = {
        (block_of[read], block_of[node])
        for node in graph.nodes
        for read in node.all_input_nodes
        if node in block_of and read in block_of and block_of[read] != block_of[node]
    }
    return tuple(Edge(source, target) for source, target in sorted(pairs))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, each under the first of its names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _attribute(model: nn.Module, node: fx.Node) -> Any:
    """What a get_attr reads; None for constants, which only the trace has."""
    value: Any = model
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value


def _block(name: str, kind: str, state: Mapping[str, torch.Tensor]) -> Block:
    floats = {
        name: tensor for name, tensor in state.items() if tensor.is_floating_point() or _is_complex_weight(tensor)
    }
    return Block(name, kind, tuple(floats), sum(tensor.nbytes for tensor in floats.values()))


def _is_complex_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.is_complex()


def _one_block(model: nn.Module) -> BlockGraph:
    return BlockGraph((_block(WHOLE, type(model).__name__, state_of(model)),), (Edge(BATCH, 0),))


class _Passed(NamedTuple):
    """What a pass in the model's mode gives.

    Attributes:
        outputs: Its tensors.
        gradients: Of the weights that have one, where the model is in training; of random ones of the outputs.
        state: By names, buffers after it and whether they need gradients then; of weights, whether they are others.
    """

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    state: dict[str, Any]


def _compared(tracer: _Tracer, model: nn.Module, fixed: Mapping[str, Any], call: inspect.BoundArguments) -> fx.Graph:
    """A trace that does what the model does: it can silently go another way, at an `isinstance`, or by a shape taken
    for constant; leave out what a forward does besides, as counting its calls; or have gradients that the model has
    not, as a trace knows no `torch.no_grad()`."""
    expected = _passed(model, model, call)
    while True:
        graph = tracer.find(model, fixed)
        try:
            found = _passed(model, fx.GraphModule(model, graph), call)
        except Exception as error:
            raise _UncutError("its trace computes something else than its forward does") from error
        other = next((name for name, value in expected.state.items() if not _close(found.state.get(name), value)), None)
        if other is not None:
            owner = model.get_submodule(other.rpartition(".")[0])
            tracer.close(owner, f"its forward makes something else of {other} than its trace does")
        elif not _close(found.outputs, expected.outputs):
            raise _UncutError("its trace computes something else than its forward does")
        elif (name := _other_gradient(found.gradients, expected.gradients)) is None:
            return graph
        elif tracer.strict:
            raise _UncutError(f"its trace has another gradient of {name} than its forward has")
        else:
            tracer.strict = True


def _passed(model: nn.Module, computing: nn.Module, call: inspect.BoundArguments) -> _Passed:
    weights = dict(model.named_parameters())
    before = _sums(weights)
    with _trial(model), torch.set_grad_enabled(model.training):
        seed_all(0)
        leaves = tree_leaves(computing(*call.args, **call.kwargs))
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        seed_all(0)
        gradients = _gradients(weights, [output for output in outputs if output.requires_grad])
        state: dict[str, Any] = {
            name: (buffer.detach().clone(), buffer.requires_grad) for name, buffer in model.named_buffers()
        }
        after = _sums(weights)
        state |= {name: value != after[name] for name, value in before.items()}
        return _Passed([output.detach().clone() for output in outputs], gradients, state)


def _gradients(weights: Mapping[str, torch.Tensor], outputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """None where there is no way back from all outputs: the loss may need some only."""
    try:
        if outputs:
            torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])
    except RuntimeError:
        return {}
    return {name: weight.grad.to_dense() for name, weight in weights.items() if weight.grad is not None}


def _sums(weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """By which it shows whether they are what they were."""
    there = {name: weight.detach() for name, weight in weights.items() if not is_lazy(weight)}
    return {name: doubled(weight.abs()).sum().item() for name, weight in there.items()}


@contextmanager
def _trial(model: nn.Module) -> Iterator[None]:
    """As `untouched`; and modules have what they had where a trace has left values of its own."""
    kept = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    with untouched(model):
        try:
            yield
        finally:
            for module, attributes, buffers in kept:
                for name in [name for name, value in vars(module).items() if _of_trace(value)]:
                    vars(module).pop(name)
                vars(module).update({name: attributes[name] for name in attributes.keys() - vars(module).keys()})
                module._buffers.update(buffers)
            for buffer in model.buffers():
                if buffer.grad_fn is not None:
                    buffer.detach_()


def _of_trace(values: Any) -> bool:
    return any(isinstance(value, fx.Proxy) for value in tree_leaves(values))


def _close(found: Any, expected: Any) -> bool:
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except (AssertionError, TypeError):
        return False
    return True


def _other_gradient(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> str | None:
    """Name of a weight whose gradient is another one by more than what kernels that sum in any order make of it."""
    for name in sorted(found.keys() ^ expected.keys()):
        return name
    rounding = 1e-5 * max((_largest(gradient) for gradient in expected.values()), default=0.0)
    for name, gradient in expected.items():
        if _largest(found[name] - gradient) > max(0.01 * _largest(gradient), rounding):
            return name
    return None


def _largest(values: torch.Tensor) -> float:
    """Of what is finite; 0 for none."""
    return float(values.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if values.numel() else 0.0


def _line_of(error: Exception) -> str:
    """The innermost line outside of torch and of here."""
    torch_folder = str(Path(torch.__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(torch_folder) and frame.filename != __file__
    ]
    if not frames:
        return "its forward"
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].line})"
