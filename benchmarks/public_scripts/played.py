"""One process of a public script's run: the script as it stands, or as it was converted, with its order of samples,
its random numbers and its final weights in the exam's hands.

    python -m benchmarks.public_scripts.played TOLD.json

Both ways get the same: dropout does nothing, seeds are shifted by `seed`, and a DataLoader that shuffles takes samples
in the order that a HetSync job has. So at D = 0 weights have to be equal. At the end rank 0 writes those of the
optimizers that the script has made.
"""

from __future__ import annotations

import functools
import importlib
import json
import random
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.utils.data import RandomSampler

import hetsync.api
from benchmarks.common.processes import launched_as
from hetsync.data.loader import EpochOrder


def shift_seeds(shift: int) -> None:
    """A script that gives itself a seed gets another one for each of the exam's."""
    seeded = torch.manual_seed
    torch.manual_seed = lambda seed: seeded(int(seed) + shift)  # type: ignore[assignment]
    torch.manual_seed(0)
    random.seed(shift)
    np.random.seed(shift)


def without_dropout() -> None:
    def as_it_is(values: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        return values

    attention = torch.nn.functional.scaled_dot_product_attention

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **named: Any
    ) -> torch.Tensor:
        return attention(query, key, value, attn_mask, 0.0, *rest, **named)

    torch.nn.functional.dropout = as_it_is  # type: ignore[assignment]
    torch.nn.functional.scaled_dot_product_attention = attend


def with_floats_of(dtype: torch.dtype) -> None:
    """What a script takes for float32's `float()`, as losses of transformers do, is of this type."""
    torch.Tensor.float = lambda tensor, **layout: tensor.to(dtype, **layout)  # type: ignore[method-assign]


def in_the_jobs_order() -> None:
    """What a job does with one DataLoader that shuffles, for the script as it stands."""
    epochs: dict[int, int] = {}

    def order(sampler: RandomSampler) -> Iterator[int]:
        epoch, samples = epochs.setdefault(id(sampler), 0), len(sampler)
        epochs[id(sampler)] += 1
        yield from EpochOrder(samples, torch.initial_seed()).indices([(epoch * samples, (epoch + 1) * samples)])

    def of_kinds(kind: type[RandomSampler], **_: Any) -> None:
        kind.__iter__ = order  # type: ignore[assignment]

    RandomSampler.__iter__ = order  # type: ignore[assignment]
    RandomSampler.__init_subclass__ = classmethod(of_kinds)  # type: ignore[assignment]


def with_settings(settings: dict[str, Any]) -> None:
    """What the exam sets of the job, where the script does not say it."""
    join = hetsync.api.join

    @functools.wraps(join)
    def joined(*things: Any, **arguments: Any) -> Any:
        return join(*things, **({"progress": False} | settings | arguments))

    hetsync.api.join = joined


def optimizers_seen(nudge: float) -> list[torch.optim.Optimizer]:
    """Those that the script makes, in this order; HetSync's own are of other modules. First weights are longer by
    `nudge`, of their length."""
    seen: list[torch.optim.Optimizer] = []
    begin = torch.optim.Optimizer.__init__

    def noted(self: torch.optim.Optimizer, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        if not type(self).__module__.startswith("hetsync"):
            seen.append(self)
            for weight in (weight for group in self.param_groups for weight in group["params"] if nudge):
                weight.data.mul_(1 + nudge)

    torch.optim.Optimizer.__init__ = noted  # type: ignore[method-assign]
    return seen


def weights_of(optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    tensors = [
        parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    ]
    return {str(number): tensor.detach().cpu().clone() for number, tensor in enumerate(tensors)}


def around(name: str | None) -> Callable[[], None]:
    """What stands in for the network and for hardware in this script's run: MODULE.FUNCTION of this package."""
    if name is None:
        return lambda: None
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"benchmarks.public_scripts.{module}"), function)


def main() -> None:
    told = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, told["dtype"]))
    with_floats_of(torch.get_default_dtype())
    without_dropout()
    shift_seeds(told["seed"])
    if told["job"] is None:
        in_the_jobs_order()
    else:
        with_settings(told["job"])
    around(told["around"])()
    seen = optimizers_seen(told["nudge"])
    script = Path(told["script"]).resolve()
    sys.argv = [str(script), *told["words"]]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    if launched_as()[0] == 0:
        save_file(weights_of(seen), told["weights"])


if __name__ == "__main__":
    main()
