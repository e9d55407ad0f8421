"""The sequence models: published sizes, losses exact for unequal slices, padding without effect, translation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hetsync import models
from hetsync.data.sets import multi30k, ptb
from hetsync.data.sets.vocabulary import BEGIN_ID, END_ID, PAD_ID, SPECIAL, Vocabulary
from hetsync.errors import UserError

WORDS = 11


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def parameters(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(("size", "millions"), [("small", 4.65), ("medium", 19.78), ("large", 66.03)])
def test_ptb_lstm_has_the_published_sizes(size: str, millions: float) -> None:
    torch.set_default_dtype(torch.float32)
    assert parameters(models.build("ptb_lstm", size=size)) / 1e6 == pytest.approx(millions, abs=0.006)


@pytest.mark.parametrize(("name", "options"), [("ptb_lstm", {"hidden": 8}), ("transformer_lm", {"width": 8})])
def test_tied_weights_are_held_once(name: str, options: dict[str, Any]) -> None:
    tied, loose = (models.build(name, vocabulary=WORDS, tied=tied, **options) for tied in (True, False))
    assert parameters(loose) - parameters(tied) == WORDS * 8
    assert set(loose.state_dict()) - set(tied.state_dict()) == {"output_weight"}
    assert tied(torch.ones(2, 3, dtype=torch.long)).shape == (2, 3, WORDS)


def test_first_weights_are_in_the_size_s_range() -> None:
    model = models.build("ptb_lstm", size="medium", hidden=16, vocabulary=WORDS)
    largest = max(weight.abs().max().item() for weight in model.parameters())
    assert 0.045 < largest <= 0.05


@pytest.mark.parametrize(("width", "millions"), [(256, 5.79), (512, 17.86)])
def test_transformer_lm_has_the_sizes_that_it_tells(width: int, millions: float) -> None:
    torch.set_default_dtype(torch.float32)
    assert parameters(models.build("transformer_lm", width=width)) / 1e6 == pytest.approx(millions, abs=0.006)


def test_transformer_lm_scores_a_word_by_those_before_it() -> None:
    model = models.build("transformer_lm", vocabulary=WORDS, width=8, heads=2, layers=2).eval()
    tokens = torch.randint(WORDS, (3, 9))
    scores = model(tokens)
    later = tokens.clone()
    later[:, 5:] = (later[:, 5:] + 1) % WORDS
    torch.testing.assert_close(model(later)[:, :5], scores[:, :5])
    assert not torch.allclose(model(later)[:, 5], scores[:, 5])
    torch.testing.assert_close(model(tokens, 4), scores[:, 5:])
    swapped = tokens.clone()
    swapped[:, [0, 1]] = torch.tensor([3, 7])
    assert not torch.allclose(model(swapped[:, [1, 0, *range(2, 9)]])[:, 8], model(swapped)[:, 8]), "it knows places"


def test_transformer_lm_begins_with_no_word_in_particular() -> None:
    model = models.build("transformer_lm", vocabulary=WORDS, width=64, layers=8).eval()
    scores = model(torch.randint(WORDS, (4, 20))).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(scores, torch.randint(WORDS, (80,)))
    assert loss.item() == pytest.approx(math.log(WORDS), abs=0.1)


def test_a_text_without_room_is_refused_in_a_sentence() -> None:
    model = models.build("transformer_lm", vocabulary=WORDS, width=8, heads=2, layers=1, longest=8)
    with pytest.raises(
        UserError, match=r"longest is 8, and a text has 9 tokens: raise it, or lower data.options.window"
    ):
        model(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(UserError, match=r"width is 9: it must be a multiple of heads, 2"):
        models.build("transformer_lm", width=9, heads=2)


def test_context_warms_the_state_without_gradient() -> None:
    model = models.build("ptb_lstm", vocabulary=WORDS, hidden=8)
    tokens = torch.tensor([[0, 2, 3, 4], [1, 2, 3, 4]])
    scores = model(tokens, 2)
    torch.testing.assert_close(scores, model(tokens)[:, 2:])
    assert not torch.allclose(scores[0], scores[1])  # they differ in their context only
    scores.sum().backward()
    assert model.embedding.weight.grad[:3].eq(0).all()
    assert model.embedding.weight.grad[3:5].ne(0).any()


def ptb_case() -> tuple[torch.nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    samples = ptb.windows(torch.randint(WORDS, (32,)), window=5, context=3, end=0)  # the last window is short
    return models.build("ptb_lstm", vocabulary=WORDS, hidden=8), ptb.loss, samples.tensors


def translation(words: int = WORDS, longest: int = 7) -> multi30k.Translation:
    vocabulary = Vocabulary([*SPECIAL, *map(str, range(len(SPECIAL), words))])
    return multi30k.Translation(["?"] * 99, vocabulary, mean_tokens=3.3, longest=longest, raw=False)


def pairs(lengths: list[tuple[int, int]]) -> multi30k.Batch:
    def sentence(words: int) -> list[int]:
        return torch.randint(len(SPECIAL), WORDS, (words,)).tolist()

    return multi30k.collate([(0, sentence(ours), sentence(theirs)) for ours, theirs in lengths])


def nmt_case() -> tuple[torch.nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    batch = pairs([(3, 4), (7, 2), (1, 9), (4, 4), (2, 6), (5, 1), (6, 3)])
    return nmt(layers=3), lambda model, part: translation().loss(model, multi30k.Batch(*part)), tuple(batch)


def nmt(**options: Any) -> Any:
    known = {"source_vocabulary": WORDS, "target_vocabulary": WORDS, "hidden": 8, "dropout": 0.0}
    return models.build("nmt", **{**known, **options})


@pytest.mark.parametrize("case", [ptb_case, nmt_case])
def test_gradient_of_a_batch_is_that_of_its_unequal_parts(case: Callable[[], Any]) -> None:
    model, loss, batch = case()
    samples = len(batch[0])

    def gradient(start: int, stop: int) -> list[torch.Tensor]:
        part = [tensor[start:stop] for tensor in batch]
        return list(torch.autograd.grad(loss(model, part), list(model.parameters())))

    whole = gradient(0, samples)
    parts = [(0, 1), (1, 3), (3, samples)]
    weighted = [[g * (stop - start) / samples for g in gradient(start, stop)] for start, stop in parts]
    for expected, *summands in zip(whole, *weighted, strict=True):
        torch.testing.assert_close(sum(summands), expected, rtol=1e-9, atol=1e-12)
        assert expected.any()


@pytest.mark.parametrize("options", [{}, {"layers": 4}, {"layers": 1, "bidirectional": False}])
def test_padding_and_companions_never_matter(options: dict[str, Any]) -> None:
    model = nmt(**options).eval()
    batch = pairs([(3, 4), (7, 9), (1, 2)])
    together = model(batch.source_BS, batch.lengths_B, batch.target_BT)
    padding = torch.arange(7) >= batch.lengths_B[:, None]
    rubbish = batch.source_BS.masked_fill(padding, WORDS - 1)
    torch.testing.assert_close(model(rubbish, batch.lengths_B, batch.target_BT), together)
    translated = model.translate(batch.source_BS, batch.lengths_B, 6)
    for i, length in enumerate(batch.lengths_B.tolist()):
        alone = batch.source_BS[i : i + 1, :length], batch.lengths_B[i : i + 1]
        torch.testing.assert_close(model(*alone, batch.target_BT[i : i + 1])[0], together[i])
        words = model.translate(*alone, 6)[0]
        assert words.tolist() == translated[i, : len(words)].tolist()
        assert translated[i, len(words) :].eq(PAD_ID).all()


def test_translation_takes_the_likeliest_word_each_time() -> None:
    model = nmt(layers=2).eval()
    batch = pairs([(3, 4), (5, 2)])
    words = model.translate(batch.source_BS, batch.lengths_B, 5)
    before = torch.cat([torch.full((2, 1), BEGIN_ID), words[:, :-1]], 1)
    likeliest = model(batch.source_BS, batch.lengths_B, before).argmax(2)
    for row, best in zip(words.tolist(), likeliest.tolist(), strict=True):
        stop = row.index(END_ID) + 1 if END_ID in row else len(row)
        assert row[:stop] == best[:stop]
        assert set(row[stop:]) <= {PAD_ID}


def test_nmt_learns_to_copy() -> None:
    torch.set_default_dtype(torch.float32)
    model, task = nmt(hidden=32), translation()
    words = torch.randint(len(SPECIAL), WORDS, (24, 3)).tolist()
    batch = multi30k.collate([(0, sentence, sentence) for sentence in words])
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(120):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    translated = model.eval().translate(batch.source_BS, batch.lengths_B, 7)
    assert translated.shape[1] == 4
    right = sum(row == [*sentence, END_ID] for row, sentence in zip(translated.tolist(), words, strict=True))
    assert right >= 20


def test_nmt_layers_from_the_third_on_are_residual() -> None:
    model = nmt(layers=4)
    for layer in model.encoder.layers[2:]:
        for weight in layer.parameters():
            torch.nn.init.zeros_(weight)  # an LSTM of zeros has outputs of zero
    x = torch.rand(2, 3, 8)
    below = model.encoder.layers[1](model.encoder.layers[0](x)[0])[0]
    torch.testing.assert_close(model.encoder(x)[0], below)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("ptb_lstm", {"size": "huge"}, "size is huge"),
        ("ptb_lstm", {"layers": 0}, "layers 0"),
        ("ptb_lstm", {"dropout": 1.0}, "dropout is 1"),
        ("nmt", {"hidden": 7}, "hidden 7"),
        ("nmt", {"dropout": -0.1}, "dropout is -0.1"),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        models.build(name, **options)
