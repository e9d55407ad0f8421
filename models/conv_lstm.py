"""ConvLSTM (Shi et al., "Convolutional LSTM Network: A Machine Learning Approach for Precipitation Nowcasting",
NeurIPS 2015).

LSTMs whose maps are convolutions read frames, and others go on from their states. Batches are those of
hetsync.data.sets.frame_prediction.

There are 7,585,296 weights, as many as the authors count. That tells what their equations do not: the forecaster's
first layer has no weights for inputs, as it has none, and peepholes are one weight a channel, which the equations have
at each pixel. They predict pixels as probabilities, by cross-entropy; here a prediction is any number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.functional import pad, pixel_shuffle, pixel_unshuffle

from hetsync.data.sets.frame_prediction import Batch
from hetsync.errors import UserError, brief
from hetsync.models.limits import require_count

State = tuple[torch.Tensor, torch.Tensor]  # h and c of a layer, (N, C, Y, X)


class ConvLSTM(nn.Module):
    """Batch of frames to predictions (N, H, 1, Y, X). Defaults are the paper's for Moving MNIST.

    Frames of any size are cut into patches, whose pixels are channels; zeros fill them up below and on the right. A
    prediction does not depend on the other samples.

    Args:
        horizon: H, frames to be predicted.
        hidden: Channels of each layer, of the encoder as of the forecaster.
        kernel_size: Of convolutions, an odd number.
        patch: Height and width of a patch.
        peephole: Whether gates read cells.
        wraps: Whether frames go on at their other side, as maps of the whole earth do.
    """

    def __init__(
        self,
        horizon: int = 10,
        hidden: Sequence[int] = (128, 64, 64),
        kernel_size: int = 5,
        patch: int = 4,
        peephole: bool = True,
        wraps: bool = False,
    ) -> None:
        super().__init__()
        for option, count in {"horizon": horizon, "kernel_size": kernel_size, "patch": patch}.items():
            require_count(option, count)
        if kernel_size % 2 == 0:
            raise UserError(f"model.options.kernel_size is {kernel_size}: it must be odd")
        if isinstance(hidden, str) or not isinstance(hidden, Sequence) or not hidden:
            raise UserError(f"model.options.hidden is {brief(hidden)}: it must be a list of channels, one a layer")
        for channels in hidden:
            require_count("hidden", channels)
        self._horizon, self._hidden, self._patch = horizon, tuple(hidden), patch
        made, below = (kernel_size, peephole, wraps), hidden[:-1]
        self.encoder = nn.ModuleList(
            Cell(inputs, channels, *made) for inputs, channels in zip((patch**2, *below), hidden, strict=True)
        )
        self.forecaster = nn.ModuleList(
            Cell(inputs, channels, *made) for inputs, channels in zip((0, *below), hidden, strict=True)
        )
        self.projection = nn.Conv2d(sum(hidden), patch**2, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        *_, height, width = batch["frames"].shape
        filled = pad(batch["frames"], (0, -width % self._patch, 0, -height % self._patch))
        patches_NTCYX = pixel_unshuffle(filled, self._patch)
        predicted = pixel_shuffle(self._forecast(self._encode(patches_NTCYX)), self._patch)[..., :height, :width]
        return predicted.to(torch.promote_types(predicted.dtype, torch.float32))

    def _encode(self, patches_NTCYX: torch.Tensor) -> list[State]:
        """Every layer's state after the last frame."""
        samples, _, _, *size = patches_NTCYX.shape
        zeros = [patches_NTCYX.new_zeros(samples, channels, *size) for channels in self._hidden]
        states = [(zero_NCYX, zero_NCYX) for zero_NCYX in zeros]
        for below_NCYX in patches_NTCYX.unbind(1):
            states = step(self.encoder, below_NCYX, states)
        return states

    def _forecast(self, states: list[State]) -> torch.Tensor:
        """Patches (N, H, C, Y, X)"""
        predicted = []
        nothing_N0YX = states[0][0][:, :0]
        for _ in range(self._horizon):
            states = step(self.forecaster, nothing_N0YX, states)
            predicted.append(self.projection(torch.cat([h_NCYX for h_NCYX, _ in states], 1)))
        return torch.stack(predicted, 1)


def step(layers: Iterable[nn.Module], below_NCYX: torch.Tensor, states: Sequence[State]) -> list[State]:
    """The layers' next states; each reads the h of the one below it, and the first what is given."""
    following = []
    for layer, state in zip(layers, states, strict=True):
        following.append(layer(below_NCYX, state))
        below_NCYX = following[-1][0]
    return following


class Cell(nn.Module):
    """An LSTM at each pixel, whose maps of inputs and of h are convolutions.

    Args:
        inputs: Channels of what it reads; 0 where it goes by its state alone.
        hidden: Channels of its state.
        kernel_size: Of the convolution.
        peephole: Whether gates read the cell.
        wraps: Whether what lies beyond an edge is at the other one; else it is zero.
    """

    def __init__(self, inputs: int, hidden: int, kernel_size: int, peephole: bool, wraps: bool) -> None:
        super().__init__()
        beyond = "circular" if wraps else "zeros"
        self.convolution = nn.Conv2d(inputs + hidden, 4 * hidden, kernel_size, padding="same", padding_mode=beyond)
        self.peepholes = nn.Parameter(torch.zeros(3, hidden, 1, 1)) if peephole else None
        with torch.no_grad():  # cells last at first
            self.convolution.get_parameter("bias")[hidden : 2 * hidden] += 1

    def forward(self, inputs_NCYX: torch.Tensor, state: State) -> State:
        """The next state."""
        h_NCYX, c_NCYX = state
        maps_NCYX = self.convolution(torch.cat([inputs_NCYX, h_NCYX], 1))
        to_in, to_forget, candidate, to_out = maps_NCYX.chunk(4, 1)
        if self.peepholes is not None:
            to_in, to_forget = to_in + self.peepholes[0] * c_NCYX, to_forget + self.peepholes[1] * c_NCYX
        c_NCYX = torch.sigmoid(to_forget) * c_NCYX + torch.sigmoid(to_in) * torch.tanh(candidate)
        if self.peepholes is not None:
            to_out = to_out + self.peepholes[2] * c_NCYX
        return torch.sigmoid(to_out) * torch.tanh(c_NCYX), c_NCYX
