"""What tests' jobs start with (tests/startup): torch's compiler is loaded late, and does then what it always does."""

from __future__ import annotations

import sys
from pathlib import Path

from jobs import finished, started

SCRIPT = """
import sys, torch
from torch._dynamo import graph_break as untouched

def step():
    optimizer.zero_grad()
    (weights ** 2).sum().backward()
    optimizer.step()

def loaded():
    return "torch._dynamo.symbolic_convert" in sys.modules

weights = torch.ones(2, requires_grad=True)
optimizer = torch.optim.SGD([weights], 0.25)
step()
print(weights.tolist(), loaded())
import torch._dynamo.config as config
doubled = torch.compile(lambda x: x.sin() * 2, backend="aot_eager")(torch.zeros(1))
step()
once = sys.modules["torch._dynamo.config"] is config is torch._dynamo.config
print(weights.tolist(), loaded(), doubled.tolist(), once)
from torch._dynamo.utils import counters
print(counters["stats"]["unique_graphs"], torch._dynamo.graph_break is not untouched)
"""


def test_the_compiler_is_loaded_by_those_that_compile(tmp_path: Path) -> None:
    with started([sys.executable, "-c", SCRIPT], tmp_path) as process:
        done = finished(process)
    assert done.status == 0, done.story
    assert done.out.splitlines() == ["[0.5, 0.5] False", "[0.25, 0.25] True [0.0] True", "1 True"], done.story
