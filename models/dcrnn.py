"""DCRNN (Li et al., "Diffusion Convolutional Recurrent Neural Network", ICLR 2018).

An encoder and a decoder of GRUs whose maps are diffusion convolutions, over random walks along the roads and against
them. Batches are those of hetsync.data.sets.sensor_network.

There are 372,353 weights, as in the authors' program. Diffusion goes by powers of the walks as in the paper (the
program has Chebyshev polynomials). A map of [x, h] is the sum of one of x and one of h, so that an encoder layer
diffuses its inputs of all steps at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from hetsync.errors import UserError
from hetsync.models.limits import require, require_count
from hetsync.models.sensor_inputs import (
    Adjacency,
    Batch,
    DiffusionConvolution,
    Readings,
    Walks,
    require_network,
)
from hetsync.models.steps import GoesBySteps

WALKS = 2  # along the roads and against them
LARGEST_EXPONENT = 700.0  # exp of more overflows


class DCRNN(GoesBySteps):
    """Batch of sensors' readings to predictions (N, H, S). Defaults are the paper's.

    The decoder reads zeros, then what it has predicted last. While training, it is taught by scheduled sampling
    (Bengio et al., NeurIPS 2015): at each step each sample reads its true target instead with probability
    k / (k + exp(seen / k)), where k is `sampling_decay` and `seen` the batches that the job has trained on. A sensor
    whose target is missing reads its prediction. Predictions do not depend on other samples.

    Args:
        sensors: S, 207 in METR-LA.
        horizon: H, steps to be predicted.
        mean: Of the training readings.
        deviation: Of the training readings.
        adjacency: (S, S), weights [i, j] of the road from i to j; it takes one.
        week: Whether it reads the day of the week, too.
        sparse: Whether the graph is kept as sparse matrices.
        layers: Of the encoder, and of the decoder.
        hidden: Units a layer.
        order: Steps of a diffusion.
        sampling_decay: k, in batches; 0 never teaches.
    """

    def __init__(
        self,
        sensors: int = 207,
        horizon: int = 12,
        mean: float = 0.0,
        deviation: float = 1.0,
        adjacency: Adjacency | None = None,
        week: bool = False,
        sparse: bool = False,
        layers: int = 2,
        hidden: int = 64,
        order: int = 2,
        sampling_decay: float = 2000.0,
    ) -> None:
        super().__init__()
        require_network(sensors, horizon)
        for option, count in {"layers": layers, "hidden": hidden, "order": order}.items():
            require_count(option, count)
        require("sampling_decay", sampling_decay, 0)
        if adjacency is None:
            raise UserError("model.options.adjacency is null: give DCRNN a graph of roads, or use graph_wavenet")
        self._readings = Readings(mean, deviation, week)
        self._horizon = horizon
        self._sampling_decay = sampling_decay
        self.walks = Walks(sensors, adjacency, sparse)
        widths = [hidden] * (layers - 1)
        self.encoder = nn.ModuleList(
            DiffusionGRU(inputs, hidden, order) for inputs in (self._readings.features, *widths)
        )
        self.decoder = nn.ModuleList(DiffusionGRU(inputs, hidden, order) for inputs in (1, *widths))
        self.projection = nn.Linear(hidden, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        walks = self.walks()
        states = self._encode(self._readings.read(batch), walks)
        return self._readings.undo(self._decode(states, walks, self._lessons(batch)))

    @property
    def taught_share(self) -> float:
        """Probability that a sample's step reads the true target while training."""
        decay = self._sampling_decay
        if decay == 0:
            return 0.0
        return decay / (decay + math.exp(min(self.step_count / decay, LARGEST_EXPONENT)))

    def _encode(self, features_NTSC: torch.Tensor, walks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Every layer's last state, (S, N, hidden)."""
        sequence_SNTC = features_NTSC.permute(2, 0, 1, 3)
        states = []
        for layer in self.encoder:
            sequence_SNTC = layer(sequence_SNTC, walks)
            states.append(sequence_SNTC[:, :, -1])
        return states

    def _decode(
        self, states: list[torch.Tensor], walks: Sequence[torch.Tensor], lessons_NHS: torch.Tensor | None
    ) -> torch.Tensor:
        """(N, H, S), normalised."""
        fed_SN = torch.zeros_like(states[0][:, :, 0])
        predicted_HSN: list[torch.Tensor] = []
        for step in range(self._horizon):
            below_SNC = fed_SN[:, :, None]
            for number, layer in enumerate(self.decoder):
                below_SNC = states[number] = layer(below_SNC[:, :, None], walks, states[number]).squeeze(2)
            fed_SN = self.projection(below_SNC).squeeze(2)
            predicted_HSN.append(fed_SN)
            if lessons_NHS is not None:
                lesson_SN = lessons_NHS[:, step].T
                fed_SN = torch.where(lesson_SN.isnan(), fed_SN, lesson_SN.to(fed_SN.dtype))
        return torch.stack(predicted_HSN).permute(2, 0, 1)

    def _lessons(self, batch: Batch) -> torch.Tensor | None:
        """Normalised targets (N, H, S), nan where the decoder reads its own prediction; None where it always does."""
        share = self.taught_share
        if not self.training or share == 0:
            return None
        targets_NHS = self._readings.normalised(batch["targets"])
        taught_NH = torch.rand(targets_NHS.shape[:2], device=targets_NHS.device) < share
        return targets_NHS.masked_fill(~taught_NH[:, :, None], math.nan)


class DiffusionGRU(nn.Module):
    """A GRU of all sensors, whose maps are diffusion convolutions.

    Args:
        inputs: Width of what it reads at a sensor.
        hidden: Units.
        order: Steps of a diffusion.
    """

    def __init__(self, inputs: int, hidden: int, order: int) -> None:
        super().__init__()
        self._hidden = hidden
        self.reading = DiffusionConvolution(inputs, 3 * hidden, WALKS, order)  # for reset, update and candidate
        self.gates = DiffusionConvolution(hidden, 2 * hidden, WALKS, order, bias=False)
        self.candidate = DiffusionConvolution(hidden, hidden, WALKS, order, bias=False)
        for part in (self.reading, self.gates, self.candidate):
            nn.init.xavier_uniform_(part.mix.weight)
        with torch.no_grad():  # states last at first
            self.reading.mix.bias.zero_()[: 2 * hidden].fill_(1)

    def forward(
        self, inputs_SNTC: torch.Tensor, walks: Sequence[torch.Tensor], state_SNC: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(S, N, T, inputs) to the states after each step, (S, N, T, hidden); it starts from `state_SNC`, or zero."""
        read_SNTG = self.reading(inputs_SNTC, walks)
        if state_SNC is None:
            state_SNC = read_SNTG.new_zeros(*read_SNTG.shape[:2], self._hidden)
        states = []
        for read_SNG in read_SNTG.unbind(2):
            state_SNC = self._next(read_SNG, state_SNC, walks)
            states.append(state_SNC)
        return torch.stack(states, 2)

    def _next(self, read_SNG: torch.Tensor, state_SNC: torch.Tensor, walks: Sequence[torch.Tensor]) -> torch.Tensor:
        to_gates_SNG, to_candidate_SNC = read_SNG.split([2 * self._hidden, self._hidden], 2)
        reset_SNC, update_SNC = torch.sigmoid(to_gates_SNG + self.gates(state_SNC, walks)).chunk(2, 2)
        candidate_SNC = torch.tanh(to_candidate_SNC + self.candidate(reset_SNC * state_SNC, walks))
        return update_SNC * state_SNC + (1 - update_SNC) * candidate_SNC
