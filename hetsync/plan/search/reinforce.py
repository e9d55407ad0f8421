"""Searches by REINFORCE (Williams 1992): whole plans are sampled, and those that cost less than usual become likelier.

Their placer reads groups in their order by an LSTM in both directions and writes a device for each by another, which
looks at all of them by attention (Mirhoseini et al. 2018).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from hetsync.plan.placement import Placement
from hetsync.plan.search.conversation import Conversation, Course
from hetsync.plan.search.features import Features
from hetsync.plan.search.search import Problem, Scored

SAMPLES = 16  # of an update
KEPT = 0.9  # of the baseline, at each update
MOST_NORM = 1.0
FORBIDDEN = -1e9  # logit of what may not be chosen
LEAST_SPREAD = 0.01  # of advantages: what is less is noise


def sampled(logits: torch.Tensor, random: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """One of the last dimension's, and its log-probability."""
    chosen = drawn(logits, random)
    return chosen, log_probabilities(logits, chosen)


def drawn(logits: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
    """One of the last dimension's (Gumbel's trick)."""
    noise = torch.from_numpy(random.gumbel(size=tuple(logits.shape)).astype(np.float32))
    return (logits.detach() + noise).argmax(-1)


def log_probabilities(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, chosen[..., None]).squeeze(-1)


def of_allowed(allowed: torch.Tensor) -> torch.Tensor:
    """Logits that are even, but for what may not be chosen."""
    return torch.zeros(allowed.shape).masked_fill(~allowed, FORBIDDEN)


def start_even(layer: nn.Linear) -> None:
    """Untrained, all of its outputs are 0."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)


class Placer(nn.Module):
    """Vectors of groups (N, G, F) to devices (N, G)."""

    def __init__(self, features: int, devices: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.LSTM(features, width // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTM(2 * width, width, batch_first=True)
        self.device = nn.Embedding(devices + 1, width)  # the last is that before the first
        self.choice = nn.Linear(2 * width, devices)
        start_even(self.choice)

    def place(
        self, groups_NGF: torch.Tensor, untrained_NGD: torch.Tensor, random: np.random.Generator, once: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sampled devices, and their log-probabilities (N, G).

        `untrained_NGD`: logits to which those of the layers are added. With `once` a device is for one group, while
        there are others. Gradients need no loop: what was chosen, group after group, goes through all layers at once.
        """
        encoded_NGW, (last, cell) = self.encoder(groups_NGF)
        state = (torch.cat([*last], 1), torch.cat([*cell], 1))
        devices_NG, untrained_NGD = self._sampled(encoded_NGW, state, untrained_NGD, random, once)
        before_NG = torch.cat([torch.full_like(devices_NG[:, :1], self._none), devices_NG[:, :-1]], 1)
        inputs_NGW = torch.cat([encoded_NGW, self.device(before_NG)], 2)
        decoded_NGW, _ = self.decoder(inputs_NGW, (state[0][None], state[1][None]))
        logits_NGD = self._logits(decoded_NGW, encoded_NGW) + untrained_NGD
        return devices_NG, log_probabilities(logits_NGD, devices_NG)

    @torch.no_grad()
    def _sampled(
        self,
        encoded_NGW: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
        untrained_NGD: torch.Tensor,
        random: np.random.Generator,
        once: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Devices (N, G), and untrained logits without the devices that were taken."""
        rows, untrained_NGD = torch.arange(len(encoded_NGW)), untrained_NGD.clone()
        device_N, devices = torch.full_like(rows, self._none), []
        for group, group_NW in enumerate(encoded_NGW.unbind(1)):
            inputs_NW = torch.cat([group_NW, self.device(device_N)], 1)
            state = torch.lstm_cell(inputs_NW, state, *self.decoder.all_weights[0])
            logits_ND = self._logits(state[0][:, None], encoded_NGW)[:, 0] + untrained_NGD[:, group]
            device_N = drawn(logits_ND, random)
            devices.append(device_N)
            if once:
                untrained_NGD[rows, group + 1 :, device_N] = FORBIDDEN
        return torch.stack(devices, 1), untrained_NGD

    def _logits(self, decoded_NSW: torch.Tensor, encoded_NGW: torch.Tensor) -> torch.Tensor:
        """(N, S, D), by attention over all groups."""
        weights_NSG = (decoded_NSW @ encoded_NGW.transpose(1, 2)).softmax(2)
        logits_NSD: torch.Tensor = self.choice(torch.cat([decoded_NSW, weights_NSG @ encoded_NGW], 2))
        return logits_NSD

    @property
    def _none(self) -> int:
        return self.device.num_embeddings - 1


class PolicyGradient(Conversation):
    """Samples, and learns with a moving average as baseline; the reward is −√T. From nothing, whatever is known.

    Attributes:
        width: Of the placer; the paper has 512.
        number_rate: Of learning the number of micro-batches, whose logits are no layer's outputs.
        numbers: Of micro-batches, of which one is chosen for all replicas by the logits `number`.
        random: Of all that is drawn.
        present: (R, D): devices of each replica.
    """

    learning_rate = 3e-3
    number_rate = 3e-3
    width = 128

    def __init__(self, problem: Problem, seed: int = 0, start: Scored | None = None) -> None:
        super().__init__(problem, seed, start)
        self.random = np.random.default_rng(seed)
        features = Features(problem, [[(rank,) for rank in ranks] for ranks in problem.given_replicas])
        self.present = torch.from_numpy(np.isfinite(features.step_seconds))
        self.numbers = problem.numbers_for(len(problem.given_replicas))
        self.number = nn.Parameter(torch.zeros(len(self.numbers)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._parameters = [self.number, *self.networks(features)]
        self._optimizer = torch.optim.Adam(self._parameters[1:], self.learning_rate)
        self._optimizer.add_param_group({"params": [self.number], "lr": self.number_rate})
        self._baseline: float | None = None

    @abstractmethod
    def networks(self, features: Features) -> Iterable[nn.Parameter]:
        """Makes them, and tells what they learn."""

    @abstractmethod
    def sample(self, allowed_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Devices (N, G) of the problem's groups, and the log-probabilities (N,) of all that was chosen."""

    def cost(self, scored: Scored) -> float:
        return self.relative_seconds(scored)

    def update(self) -> Course:
        replicas = len(self.present)
        devices_NG, chosen_N = self.sample(self.present.repeat(SAMPLES, 1))
        numbers, numbered = sampled(self.number.expand(SAMPLES, -1), self.random)
        plans = devices_NG.view(SAMPLES, replicas, -1).tolist()
        placements = [self._placement(*plan) for plan in zip(plans, numbers.tolist(), strict=True)]
        costs = [self.cost(scored) for scored in (yield from self.ask(placements))]
        self._learn(chosen_N.view(SAMPLES, replicas).sum(1) + numbered, [-(cost**0.5) for cost in costs])

    def _placement(self, devices_RG: Sequence[Sequence[int]], number: int) -> Placement:
        return Placement(
            tuple(
                self.problem.replica([ranks[device] for device in devices], self.numbers[number])
                for ranks, devices in zip(self.problem.given_replicas, devices_RG, strict=True)
            )
        )

    def _learn(self, log_probabilities_N: torch.Tensor, rewards: Sequence[float]) -> None:
        mean = sum(rewards) / len(rewards)
        self._baseline = mean if self._baseline is None else KEPT * self._baseline + (1 - KEPT) * mean
        self._optimizer.zero_grad()
        advantages_N = torch.tensor(rewards) - self._baseline
        advantages_N = advantages_N / (advantages_N.std() + LEAST_SPREAD)
        (-(log_probabilities_N * advantages_N).mean()).backward()
        nn.utils.clip_grad_norm_(self._parameters, MOST_NORM)
        self._optimizer.step()
