"""Optimizers that keep more than the state of each weight: in their groups, as Prodigy and schedule-free ones do, in a
state of no weight, and in a `state_dict` of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Adapting(Optimizer):
    """Finds its rate itself: an estimate of the distance to the solution, which only grows, is in the groups."""

    def __init__(self, params: Iterable[Any], lr: float = 1.0, d0: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "d": d0, "numerator": 0.0, "denominator": torch.zeros(()), "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = group["d"] * group["lr"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["first"], state["norm"] = weight.detach().clone(), torch.zeros(())
                state["norm"] += weight.grad.square().sum()
                group["numerator"] += rate * float((weight.grad * (state["first"] - weight)).sum())
                group["denominator"] += rate * weight.grad.abs().sum()
                weight -= rate * weight.grad / state["norm"].sqrt().clamp_min(1e-12)
            estimate = 5 * group["numerator"] / max(1e-12, float(group["denominator"])) + 1.01 * group["d"]
            group["d"] = min(1.0, max(group["d"], estimate))
            group["k"] += 1


class Averaging(Optimizer):
    """Steps on one point and averages another; weights are between them while it trains, and the average otherwise."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_sum": 0.0, "k": 0, "training": False, "peak": None})

    @torch.no_grad()
    def _move(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                for weight in group["params"]:
                    if "z" in self.state[weight]:
                        share = 1 - group["beta"] if training else 1 - 1 / group["beta"]
                        weight.lerp_(self.state[weight]["z"], share)
                group["training"] = training

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["training"]
            rate = group["lr"] * min(1.0, (group["k"] + 1) / 8)
            group["peak"] = max(rate, group["peak"] or 0.0)
            group["weight_sum"] += rate**2
            share = rate**2 / group["weight_sum"]
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    z = state.setdefault("z", weight.detach().clone())
                    weight.lerp_(z, share)
                    weight.sub_(weight.grad, alpha=rate * (1 - group["beta"] * (1 - share)))
                    z.sub_(weight.grad, alpha=rate)
            group["k"] += 1


class Listing(torch.optim.Optimizer):
    """Keeps lists of tensors, and nothing, of each weight, as SOAP and its kin do."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    last = [weight.grad.clone(), *state.get("last", [])][:3]
                    state |= {"last": last, "deep": {"of": [None, last[0]]}}
                    weight -= group["lr"] * sum(last)


class Elsewhere(torch.optim.SGD):
    """What it makes is in the state of no weight, and in its `state_dict` alone."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(params, lr=lr, momentum=0.5)
        self.pace = torch.ones(2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight in (weight for group in self.param_groups for weight in group["params"] if weight.grad is not None):
            weight.grad.mul_(self.pace.mean())
        self.pace += 0.01
        shared = self.state["all"]  # type: ignore[index]
        shared["steps"] = shared.get("steps", 0) + 1
        shared["seconds"] = shared.get("seconds", 0.0) + 0.5
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pace": self.pace}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pace = state_dict["pace"].clone()
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "pace"})
