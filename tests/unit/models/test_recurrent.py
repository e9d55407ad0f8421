"""Recurrent layers one after the other compute what one module of several layers does, bit for bit."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hetsync import models
from hetsync.models.recurrent import Pack, RecurrentLayer, Unpack

LENGTHS_B = torch.tensor([4, 7, 1])


def copy_layers(into: nn.LSTM, *layers: nn.LSTM) -> None:
    with torch.no_grad():
        for number, layer in enumerate(layers):
            for name, weight in layer.named_parameters():
                into.get_parameter(name.replace("l0", f"l{number}")).copy_(weight)


def test_packed_layers_with_dropout_between() -> None:
    first, second = RecurrentLayer(5, 8), RecurrentLayer(8, 8, dropout=0.5)
    whole = nn.LSTM(5, 8, 2, batch_first=True, dropout=0.5)
    copy_layers(whole, first, second)
    x_BTH = torch.randn(3, 7, 5)

    torch.manual_seed(1)
    packed = pack_padded_sequence(x_BTH, LENGTHS_B, batch_first=True, enforce_sorted=False)
    expected_BTH, _ = pad_packed_sequence(whole(packed)[0], batch_first=True, total_length=7)
    torch.manual_seed(1)
    elements, packing = Pack()(x_BTH, LENGTHS_B)
    hidden_BTH = Unpack()(second(first(elements, packing)[0], packing)[0], packing, 7)

    assert torch.equal(hidden_BTH, expected_BTH)
    expected_BTH.square().sum().backward()
    hidden_BTH.square().sum().backward()
    assert torch.equal(first.weight_ih_l0.grad, whole.weight_ih_l0.grad)
    assert torch.equal(second.weight_hh_l0.grad, whole.weight_hh_l1.grad)


def test_both_directions_end_in_one_state() -> None:
    layer = RecurrentLayer(4, 6, bidirectional=True)
    outputs_BTH, (h, c) = layer(torch.randn(2, 3, 4))
    assert outputs_BTH.shape == (2, 3, 6)
    assert h.shape == c.shape == (1, 2, 6)
    torch.testing.assert_close(h[0], torch.cat([outputs_BTH[:, -1, :3], outputs_BTH[:, 0, 3:]], 1))


def test_a_residual_layer_adds_what_came_in() -> None:
    layer = RecurrentLayer(4, 4, residual=True)
    x_BTH = torch.randn(2, 3, 4)
    outputs_BTH, _ = layer(x_BTH)
    assert torch.equal(outputs_BTH, nn.LSTM.forward(layer, x_BTH)[0] + x_BTH)


def test_layers_of_the_language_model_warm_up_each() -> None:
    model = models.build("ptb_lstm", vocabulary=11, hidden=8)
    whole = nn.LSTM(8, 8, 2, batch_first=True)
    copy_layers(whole, *model.lstm)
    tokens_BT = torch.randint(11, (3, 6))
    embedded_BTH = model.embedding(tokens_BT)

    with torch.no_grad():
        _, state = whole(embedded_BTH[:, :4])
    outputs_BTH, _ = whole(embedded_BTH[:, 4:], state)
    expected = nn.functional.linear(outputs_BTH, model.output_weight, model.output_bias)

    assert torch.equal(model(tokens_BT, 2), expected)
