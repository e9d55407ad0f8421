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
LEAST_SPREAD = 0.01  # of advantages: what is less is noise


def sampled(logits: torch.Tensor, random: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """One of the last dimension's, and its log-probability."""
    noise = torch.from_numpy(random.gumbel(size=tuple(logits.shape)).astype(np.float32))
    chosen = (logits.detach() + noise).argmax(-1)
    return chosen, logits.log_softmax(-1).gather(-1, chosen[..., None]).squeeze(-1)


def start_even(layer: nn.Linear) -> None:
    """Untrained, all of its outputs are 0."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)


class Placer(nn.Module):
    """Vectors of groups (N, G, F) to devices (N, G)."""

    def __init__(self, features: int, devices: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.LSTM(features, width // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTMCell(2 * width, width)
        self.device = nn.Embedding(devices + 1, width)  # the last is that before the first
        self.choice = nn.Linear(2 * width, devices)
        start_even(self.choice)

    def place(
        self, groups_NGF: torch.Tensor, allowed_ND: torch.Tensor, random: np.random.Generator, once: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sampled devices of those allowed, and their log-probabilities (N, G); with `once` each for one group, as long
        as there are any."""
        encoded_NGW, (last, cell) = self.encoder(groups_NGF)
        state = (torch.cat([*last], 1), torch.cat([*cell], 1))
        rows = torch.arange(len(groups_NGF))
        device = torch.full((len(groups_NGF),), self.device.num_embeddings - 1)
        allowed_ND, devices, log_probabilities = allowed_ND.clone(), [], []
        for group_NW in encoded_NGW.unbind(1):
            state = self.decoder(torch.cat([group_NW, self.device(device)], 1), state)
            weights_NG = (encoded_NGW @ state[0][:, :, None]).squeeze(2).softmax(1)
            context_NW = (weights_NG[:, :, None] * encoded_NGW).sum(1)
            logits = self.choice(torch.cat([state[0], context_NW], 1)).masked_fill(~allowed_ND, -1e9)
            device, log_probability = sampled(logits, random)
            devices.append(device)
            log_probabilities.append(log_probability)
            if once:
                allowed_ND[rows, device] = False
        return torch.stack(devices, 1), torch.stack(log_probabilities, 1)


class PolicyGradient(Conversation):
    """Samples, and learns with a moving average as baseline; the reward is −√T. From nothing, whatever is known.

    Attributes:
        width: Of the placer; the paper has 512.
        random: Of all that is drawn.
        present: (R, D): devices of each replica.
    """

    learning_rate = 3e-3
    width = 128

    def __init__(self, problem: Problem, seed: int = 0, start: Scored | None = None) -> None:
        super().__init__(problem, seed, start)
        self.random = np.random.default_rng(seed)
        features = Features(problem, [[(rank,) for rank in ranks] for ranks in problem.given_replicas])
        self.present = torch.from_numpy(np.isfinite(features.step_seconds))
        self._numbers = problem.numbers_for(len(problem.given_replicas))
        self._number = nn.Parameter(torch.zeros(len(self._numbers)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._parameters = [self._number, *self.networks(features)]
        self._optimizer = torch.optim.Adam(self._parameters, self.learning_rate)
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
        numbers, numbered = sampled(self._number.expand(SAMPLES, -1), self.random)
        plans = devices_NG.view(SAMPLES, replicas, -1).tolist()
        placements = [self._placement(*plan) for plan in zip(plans, numbers.tolist(), strict=True)]
        costs = [self.cost(scored) for scored in (yield from self.ask(placements))]
        self._learn(chosen_N.view(SAMPLES, replicas).sum(1) + numbered, [-(cost**0.5) for cost in costs])

    def _placement(self, devices_RG: Sequence[Sequence[int]], number: int) -> Placement:
        return Placement(
            tuple(
                self.problem.replica([ranks[device] for device in devices], self._numbers[number])
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
