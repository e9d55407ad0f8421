"""Processes of tests start without what takes long, and differ in nothing else."""

from __future__ import annotations

import subprocess
import sys

import torch
from jobs import environment

CODE = """
import gc, sys, torch

def train(compiled, steps=3):
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    torch.randperm(4, generator=torch.Generator().manual_seed(0))
    forward = torch.compile(layer, backend="eager") if compiled else layer
    optimizer = torch.optim.Adam(layer.parameters(), 0.1)
    for number in range(steps):
        optimizer.zero_grad()
        forward(torch.full((4, 3), number + 1.0)).square().sum().backward()
        optimizer.step()
    assert torch.is_grad_enabled()
    return [value for tensor in (layer.weight, layer.bias) for value in tensor.flatten().tolist()]
"""
SAY = """
class Cycle:
    def __init__(self): self.me = self
    def __del__(self): print("collected")

print(train(compiled=False))
print("torch._dynamo" in sys.modules, "torch._decomp" in sys.modules, gc.isenabled())
print(train(compiled=True))
print("torch._dynamo" in sys.modules, "torch._decomp" in sys.modules)
Cycle()
gc.collect()
"""


def test_training_needs_no_compiler_and_the_compiler_works_as_ever() -> None:
    words = [sys.executable, "-c", CODE + SAY]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    mine: dict[str, object] = {}
    exec(CODE, mine)
    trained = str(mine["train"](compiled=False))  # type: ignore[operator]
    # An older torch needs parts of what is for compilers.
    parts = "False" if hasattr(torch._C, "_set_generator_metaclass") else "True"
    assert done.stdout.splitlines() == [trained, f"False {parts} True", trained, "True True", "collected"]
