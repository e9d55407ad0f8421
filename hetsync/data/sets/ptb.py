"""The Penn Treebank's words as language models use them: Mikolov's preprocessing, one sentence a line.

A sample is a window of the running text. Samples are shuffled and spread over ranks, so no hidden state passes from
one window to the next as it does on a single device (Zaremba et al. 2014); instead each window comes with the tokens
before it, which warm the state up and are not predicted. Every token of a split is predicted exactly once.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

from hetsync.data import Data
from hetsync.data.findings import Findings
from hetsync.data.sets.vocabulary import END, UNKNOWN, Vocabulary, perplexity, read_lines, refuse
from hetsync.errors import UserError

SPLITS = ("train", "valid", "test")
NO_TARGET = -100  # what cross_entropy ignores: fills the last window
LONGEST = 200  # words; the longest sentence of the treebank has 82
EVALUATED_TOGETHER = 32  # windows: their scores take 45 MB at 10,000 words


def ptb(path: str = "data/ptb", window: int = 35, context: int = 35) -> Data:
    """Windows of ptb.train.txt; of ptb.valid.txt, to evaluate on while training; and of ptb.test.txt.

    A sample is (tokens of shape (context + window), targets of shape (window)): the targets are the tokens that
    follow the last `window` ones. Targets of -100 fill the last window. At the start of the text, <eos> stands for
    the context. The vocabulary is that of the training split with <eos>, 10,000 words.

    Args:
        path: Folder of the three files.
        window: Tokens that a sample predicts.
        context: Tokens before them.
    """
    folder = Path(path)
    if window < 1 or context < 0:
        raise UserError(f"data.options has window {window} and context {context}: give at least 1 and at least 0")
    texts = {split: _read(folder, split) for split in SPLITS}
    vocabulary = Vocabulary.most_frequent([texts["train"]])
    if UNKNOWN not in vocabulary:
        refuse("ptb", folder)(f"ptb.train.txt in {folder}", f"has no {UNKNOWN}, which stands for rare words")
    (end,) = vocabulary.encode([END])
    train, validation, test = (
        windows(torch.tensor(vocabulary.encode(text)), window, context, end) for text in texts.values()
    )
    return Data(
        train,
        test,
        loss,
        metrics,
        report,
        validation=validation,
        rows=rows,
        model_options={"vocabulary": len(vocabulary)},
    )


def windows(text_N: torch.Tensor, window: int, context: int, end: int) -> TensorDataset:
    """Cut a text into windows, the last filled up."""
    count = -(-len(text_N) // window)
    filled = count * window - len(text_N)
    targets = functional.pad(text_N, (0, filled), value=NO_TARGET).view(count, window)
    stream = functional.pad(text_N, (context + 1, filled), value=end)
    tokens = stream.unfold(0, context + window, window)[:count]  # a view: overlaps take no memory
    return TensorDataset(tokens, targets)


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Mean over windows of their cross-entropy per token of a full window."""
    return _nll(model, *batch) / batch[1].numel()


def metrics(model: torch.nn.Module, batch: Any) -> dict[str, float]:
    """Cross-entropy and number of the predicted tokens."""
    parts = zip(*(tensor.split(EVALUATED_TOGETHER) for tensor in batch), strict=True)
    nll = sum(_nll(model, tokens, targets).item() for tokens, targets in parts)
    return {"nll": nll, "tokens": (batch[1] != NO_TARGET).sum().item()}


def report(sums: dict[str, float]) -> dict[str, float]:
    """Perplexity, and the loss per token that it is the exponential of."""
    return {
        "perplexity": perplexity(sums["nll"], sums["tokens"]),
        "loss": sums["nll"] / max(1.0, sums["tokens"]),
    }


def rows(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """A row a token: its place in its window, and its cross-entropy, nan where the window is filled up."""
    losses = []
    for tokens_BT, targets_BW in zip(*(tensor.split(EVALUATED_TOGETHER) for tensor in batch), strict=True):
        scores_BWV = model(tokens_BT, targets_BW.shape[1])
        loss_BW = functional.cross_entropy(scores_BWV.mT, targets_BW, reduction="none", ignore_index=NO_TARGET)
        losses.append(loss_BW.masked_fill(targets_BW == NO_TARGET, torch.nan))
    loss_BW = torch.cat(losses)
    places_W = torch.arange(loss_BW.shape[1])
    return {"position": places_W.repeat(len(loss_BW)), "token": batch[1].flatten(), "loss": loss_BW.flatten()}


def _nll(model: torch.nn.Module, tokens_BT: torch.Tensor, targets_BW: torch.Tensor) -> torch.Tensor:
    scores_BWV = model(tokens_BT, targets_BW.shape[1])
    return functional.cross_entropy(
        scores_BWV.flatten(0, 1), targets_BW.flatten(), reduction="sum", ignore_index=NO_TARGET
    )


def _read(folder: Path, split: str) -> list[str]:
    """All words of a split, <eos> after each sentence."""
    file = folder / f"ptb.{split}.txt"
    if not file.is_file():
        raise UserError(f"data.options.path is {folder}, which has no {file.name}: give the folder of the PTB text")
    lines = read_lines(file, refuse("ptb", folder))
    return [word for line in lines if line for word in [*line.split(), END]]


def check(path: Path, findings: Findings) -> None:
    """Count sentences, tokens and vocabulary; report bad lines and words that the training split has not."""
    known: Counter[str] = Counter()
    for split in SPLITS:
        file = path / f"ptb.{split}.txt"
        for number, line in enumerate(read_lines(file, findings.problem), 1):
            if line is None:
                continue
            words = line.split()
            findings.count(f"{split} sentences")
            findings.count(f"{split} tokens with {END}", len(words) + 1)
            if len(words) > LONGEST:
                findings.problem(f"{file}:{number}", f"has {len(words)} words, over {LONGEST}", "over-long")
            if split == "train":
                known.update([*words, END])
            elif known and (strange := sorted(set(words) - known.keys())):
                findings.problem(f"{file}:{number}", f"has words unknown in training: {strange}", "unknown words")
    findings.count("vocabulary", len(known))
