"""A traced model in parts that run apart from each other, each on the values that others hand over."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from hetsync.errors import UserError
from hetsync.plan.blocks import Traced
from hetsync.plan.graph import BATCH

RETURNED = "returned by the model"  # no operation has such a name

Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Part:
    """Blocks that run as one unit.

    Attributes:
        module: Values of `arguments` and then of `reads` to those of `writes`, and at the end, in the last part, what
            the model returns; else None.
        arguments: Arguments of the model's forward that it reads itself.
        reads: Names of values by the parts that hand them over.
        writes: Names of values by the parts that they are handed to.
        late: Parts whose values it reads only to return them: they may come after it has run.
    """

    module: fx.GraphModule
    arguments: tuple[str, ...]
    reads: Mapping[int, tuple[str, ...]]
    writes: Mapping[int, tuple[str, ...]]
    late: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Missing:
    """Stands for a value that has yet to come, among what the model returns."""

    name: str


def split(model: nn.Module, traced: Traced, part_of: Sequence[int], last: int | None = None) -> list[Part]:
    """Parts by number.

    Args:
        model: What was traced.
        traced: Its operations.
        part_of: Parts of the blocks, by block.
        last: The part that returns what the model does; left out: that of the last block.
    """
    of = {node: part_of[block] for node, block in traced.block_of.items() if block != BATCH}
    last = part_of[-1] if last is None else last
    return [_Splitter(model, traced, of, part, last).part() for part in range(max(part_of) + 1)]


def check_call(call: inspect.BoundArguments, traced: Traced) -> None:
    """UserError where a call would have gone another way than that which was traced."""
    for name, value in traced.fixed.items():
        now = call.arguments[name]
        if now is not value and now != value:
            raise UserError(
                f"the model was called with {name} = {value} first and with {now} now: where a plan cuts it, its calls"
                " must be alike"
            )


class Pass:
    """The forward pass of a batch through a part, kept until its backward pass.

    `outputs` are the values that the part hands over, by name, and under `RETURNED` what the model returns, if it is
    the last part. `inputs` of parts that are `late` may be left out, and be given to `complete`.
    """

    def __init__(self, part: Part, call: inspect.BoundArguments, inputs: Mapping[str, Any]) -> None:
        self._inputs = {name: detached(value) for name, value in inputs.items()}
        own = [call.arguments[name] for name in part.arguments]
        received = [self._inputs.get(name, _Missing(name)) for names in part.reads.values() for name in names]
        values = part.module(*own, *received)
        names = dict.fromkeys(name for names in part.writes.values() for name in names)
        self.outputs: dict[str, Any] = dict(zip((*names, RETURNED), values, strict=True))
        self._gradients: dict[str, Gradients] = {}

    def complete(self, inputs: Mapping[str, Any]) -> None:
        """With those that came late."""
        self._inputs.update({name: detached(value) for name, value in inputs.items()})
        self.outputs[RETURNED] = tree_map(
            lambda value: self._inputs[value.name] if isinstance(value, _Missing) else value, self.outputs[RETURNED]
        )

    def add_gradients(self, name: str, gradients: Gradients) -> None:
        """Of one of its readers, for an output."""
        before = self._gradients.get(name, [None] * len(gradients))
        self._gradients[name] = [_sum(*each) for each in zip(before, gradients, strict=True)]

    def backward(self) -> None:
        """Once all gradients have come. They are added to those of the weights that there are."""
        values, gradients = [], []
        for name, given in self._gradients.items():
            for value, gradient in zip(differentiable(self.outputs[name]), given, strict=True):
                if gradient is not None:
                    values.append(value)
                    gradients.append(gradient)
        if values:
            torch.autograd.backward(values, gradients)

    def gradients(self, name: str) -> Gradients:
        """Of an input, after the backward pass."""
        return gradients_of(self._inputs[name])


def detached(values: Any) -> Any:
    """The same values, where gradients can be asked for: tensors that need them are leaves of a graph of their own."""

    def apart(value: Any) -> Any:
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value

    return tree_map(apart, values)


def differentiable(values: Any) -> list[torch.Tensor]:
    """The tensors among them that need gradients, in their order."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor) and value.requires_grad]


def gradients_of(values: Any) -> Gradients:
    """Of the tensors among them that need some, in their order; None where none has come."""
    return [value.grad for value in differentiable(values)]


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


class _Splitter:
    """Copies out of a graph what one part runs."""

    def __init__(self, model: nn.Module, traced: Traced, of: Mapping[fx.Node, int], number: int, last: int) -> None:
        self._model, self._graph, self._of = model, traced.graph, of
        self._number, self._last = number, last
        self._output = next(node for node in reversed(traced.graph.nodes) if node.op == "output")
        self._roots = [node for node in of if of[node] == number]
        if number == last:
            self._roots.append(self._output)

    def part(self) -> Part:
        reads = self._by_part({node: [self._of[node]] for node in self._read()})
        writes = self._by_part({node: self._readers(node) for node in self._roots if node is not self._output})
        running = self._running()
        arguments = [node for node in running if node.op == "placeholder"]
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in (*arguments, *(node for nodes in reads.values() for node in nodes)):
            copies[node] = graph.placeholder(node.name)
        for node in running:
            if node not in copies and node is not self._output:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        written = dict.fromkeys(node for nodes in writes.values() for node in nodes)
        returned = fx.map_arg(self._output.args[0], copies.__getitem__) if self._number == self._last else None
        graph.output((*(copies[node] for node in written), returned))
        return Part(
            fx.GraphModule(self._model, graph),
            tuple(str(node.target) for node in arguments),
            _names(reads),
            _names(writes),
            frozenset(part for part, nodes in reads.items() if not self._needed.intersection(nodes)),
        )

    def _running(self) -> list[fx.Node]:
        """Its own operations, and what they need of the batch and of the weights; in order."""
        wanted = set(self._roots)
        for node in reversed(self._graph.nodes):
            if node in wanted:
                wanted.update(read for read in node.all_input_nodes if self._of.get(read, self._number) == self._number)
        return [node for node in self._graph.nodes if node in wanted]

    @property
    def _needed(self) -> set[fx.Node]:
        """What its own operations read."""
        return {read for node in self._roots if node is not self._output for read in node.all_input_nodes}

    def _read(self) -> list[fx.Node]:
        read = {read for node in self._roots for read in node.all_input_nodes}
        return [node for node in self._of if node in read and self._of[node] != self._number]

    def _readers(self, node: fx.Node) -> list[int]:
        return sorted({self._last if user is self._output else self._of[user] for user in node.users} - {self._number})

    def _by_part(self, parts: Mapping[fx.Node, Sequence[int]]) -> dict[int, list[fx.Node]]:
        numbers = sorted({number for found in parts.values() for number in found})
        return {number: [node for node in parts if number in parts[node]] for number in numbers}


def _names(nodes: Mapping[int, Sequence[fx.Node]]) -> dict[int, tuple[str, ...]]:
    return {part: tuple(node.name for node in each) for part, each in nodes.items()}
