"""Multi30k: captions of pictures in English and German (Elliott et al. 2016), and parallel text in the same files.

BLEU is sacrebleu's corpus BLEU. On tokenised text it is computed on the tokens as they stand (tokenised, lower-cased
BLEU, as most papers on Multi30k give it); on raw text, on detokenised translations against the raw lines with
sacrebleu's own tokeniser (13a). The two are not comparable. References keep the words outside the vocabulary.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hetsync.data import Data
from hetsync.data.findings import Findings
from hetsync.data.sets.vocabulary import BEGIN_ID, END_ID, PAD_ID, SPECIAL, Vocabulary, perplexity, read_lines, refuse
from hetsync.errors import UserError
from hetsync.extras import require

MARKS = {"tokenised": ".lc.norm.tok", "raw": ""}  # in the names of the files
FILE = re.compile(r"((?:train|val|test)\w*(?:\.lc\.norm\.tok)?)\.([a-z]{2})(?:\.gz)?")
LONGEST = 100  # words; captions are far shorter
EVALUATED_TOGETHER = 64  # pairs: their scores take 80 MB at 40 words and 8,000 in the vocabulary
ORDERS = (1, 2, 3, 4)  # of BLEU's n-grams

WORD = re.compile(r"\w+(?:[-'’]\w+)*-?|[^\w\s]")
NO_SPACE_BEFORE = re.compile(r" ([.,!?;:%)\]}…])")
NO_SPACE_AFTER = re.compile(r"([(\[{]) ")
QUOTED = re.compile(r'(["„]) (.*?) (["“])')


class Batch(NamedTuple):
    """Sentence pairs: their numbers, source words, numbers of source words, and <bos>, target words, <eos>."""

    numbers_B: torch.Tensor
    source_BS: torch.Tensor
    lengths_B: torch.Tensor
    target_BT: torch.Tensor


class Pairs(Dataset[tuple[int, list[int], list[int]]]):
    """Sentence pairs as numbers of words, themselves numbered from `first` on."""

    def __init__(self, first: int, sources: Sequence[list[int]], targets: Sequence[list[int]]) -> None:
        self._first = first
        self._sources = sources
        self._targets = targets

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: int) -> tuple[int, list[int], list[int]]:
        return self._first + index, self._sources[index], self._targets[index]


def collate(items: list[tuple[int, list[int], list[int]]]) -> Batch:
    """Pad both sides to the longest of the batch."""
    numbers, sources, targets = zip(*items, strict=True)
    return Batch(
        torch.tensor(numbers),
        pad_sequence([torch.tensor(words) for words in sources], batch_first=True, padding_value=PAD_ID),
        torch.tensor([len(words) for words in sources]),
        pad_sequence(
            [torch.tensor([BEGIN_ID, *words, END_ID]) for words in targets], batch_first=True, padding_value=PAD_ID
        ),
    )


@dataclass(frozen=True)
class Translation:
    """What a `Batch` means to a model that scores target words and translates (see hetsync.models.nmt).

    Args:
        references: Target sentences as text, by the numbers of their pairs.
        vocabulary: Target words.
        mean_tokens: Target tokens, <eos> among them, of the mean training pair: the unit of the loss.
        longest: Most words of a translation.
        raw: Whether the references are raw text, or tokens with blanks between.
    """

    references: Sequence[str]
    vocabulary: Vocabulary
    mean_tokens: float
    longest: int
    raw: bool

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Mean over pairs of their summed cross-entropy; in units of a mean pair's tokens, so about that per token."""
        return self._nll(model, batch) / (len(batch.numbers_B) * self.mean_tokens)

    def metrics(self, model: Any, batch: Batch) -> dict[str, float]:
        """Cross-entropy and number of tokens; statistics of BLEU of the model's own translations."""
        from sacrebleu.metrics.bleu import BLEU

        ids_BT = model.translate(batch.source_BS, batch.lengths_B, self.longest).tolist()
        references = [self.references[number] for number in batch.numbers_B.tolist()]
        bleu = BLEU(tokenize="13a" if self.raw else "none", force=True)  # force: do not warn of tokens
        score = bleu.corpus_score([self._text(ids) for ids in ids_BT], [references])
        parts = zip(*(tensor.split(EVALUATED_TOGETHER) for tensor in batch), strict=True)
        return {
            "nll": sum(self._nll(model, Batch(*part)).item() for part in parts),
            "tokens": (batch.target_BT[:, 1:] != PAD_ID).sum().item(),
            "system_length": score.sys_len,
            "reference_length": score.ref_len,
            **{f"matches_{n}": score.counts[n - 1] for n in ORDERS},
            **{f"totals_{n}": score.totals[n - 1] for n in ORDERS},
        }

    def report(self, sums: dict[str, float]) -> dict[str, float]:
        """BLEU (0 to 100), perplexity per target token, and the loss."""
        from sacrebleu.metrics.bleu import BLEU

        score = BLEU.compute_bleu(
            [int(sums[f"matches_{n}"]) for n in ORDERS],
            [int(sums[f"totals_{n}"]) for n in ORDERS],
            int(sums["system_length"]),
            int(sums["reference_length"]),
            smooth_method="exp",  # sacrebleu's default for corpora
        )
        return {
            "bleu": score.score,
            "perplexity": perplexity(sums["nll"], sums["tokens"]),
            "loss": sums["nll"] / (max(1.0, sums["samples"]) * self.mean_tokens),
        }

    @staticmethod
    def _nll(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        scores_BTV = model(batch.source_BS, batch.lengths_B, batch.target_BT[:, :-1])
        labels = batch.target_BT[:, 1:].flatten()
        return functional.cross_entropy(scores_BTV.flatten(0, 1), labels, reduction="sum", ignore_index=PAD_ID)

    def _text(self, ids: list[int]) -> str:
        words = self.vocabulary.decode(ids[: ids.index(END_ID)] if END_ID in ids else ids)
        return detokenise(words) if self.raw else " ".join(words)


def multi30k(
    path: str = "data/multi30k",
    source: str = "en",
    target: str = "de",
    vocabulary: int = 8000,
    form: str = "tokenised",
    lowercase: bool = False,
    test: str = "test_2016_flickr",
    longest: int = LONGEST,
) -> Data:
    """Pairs of train.*; of val.*, to evaluate on while training; and of a split to test on; as `Batch`es.

    Tokenised text (train.lc.norm.tok.en) is split at blanks, raw text (train.en) by `tokenise`. Files may be zipped.

    Args:
        path: Folder of the files.
        source: Language to translate from.
        target: Language to translate to.
        vocabulary: Most words a side, the most frequent of the training split; <pad>, <unk>, <bos> and <eos> count.
        form: tokenised or raw.
        lowercase: Lower-case all text, so that BLEU ignores case.
        test: Split to test on: test_2016_flickr, test_2017_flickr or test_2017_mscoco.
        longest: Most words: training pairs with more on a side are left out, translations end there.
    """
    require("text", "data.name multi30k")
    if form not in MARKS:
        raise UserError(f"data.options.form is {form}: use tokenised or raw")
    if vocabulary <= len(SPECIAL) or longest < 1:
        raise UserError(f"data.options has vocabulary {vocabulary}, longest {longest}: give at least 5 and at least 1")
    words_of = tokenise if form == "raw" else str.split
    splits = []
    for split in ("train", "val", test):
        sides = [_read(Path(path), split, form, language, lowercase) for language in (source, target)]
        if len(sides[0]) != len(sides[1]):
            what = f"has {len(sides[0])} lines of {source} and {len(sides[1])} of {target}"
            refuse("multi30k", Path(path))(f"{split} ({form})", what)
        splits.append([(words_of(ours), words_of(theirs), theirs) for ours, theirs in zip(*sides, strict=True)])
    train = [pair for pair in splits[0] if max(len(pair[0]), len(pair[1])) <= longest]
    if not train:
        raise UserError(f"data.options.longest is {longest}, which leaves no training pair: give more")
    vocabularies = [Vocabulary.most_frequent([pair[i] for pair in train], vocabulary, SPECIAL) for i in (0, 1)]
    pairs = [*train, *splits[1], *splits[2]]
    encoded = [[v.encode(pair[i]) for pair in pairs] for i, v in enumerate(vocabularies)]
    ends = len(train), len(train) + len(splits[1])
    task = Translation(
        references=[reference for _, _, reference in pairs],
        vocabulary=vocabularies[1],
        mean_tokens=sum(len(pair[1]) + 1 for pair in train) / len(train),
        longest=longest,
        raw=form == "raw",
    )
    return Data(
        Pairs(0, *(side[: ends[0]] for side in encoded)),
        Pairs(ends[1], *(side[ends[1] :] for side in encoded)),
        task.loss,
        task.metrics,
        task.report,
        collate,
        validation=Pairs(ends[0], *(side[ends[0] : ends[1]] for side in encoded)),
        costs=[float(len(pair[0]) + len(pair[1])) for pair in train],
        model_options={"source_vocabulary": len(vocabularies[0]), "target_vocabulary": len(vocabularies[1])},
    )


def tokenise(line: str) -> list[str]:
    """Words, with hyphens (also a last one) and apostrophes inside them, and every other sign on its own."""
    return WORD.findall(line)


def detokenise(words: Sequence[str]) -> str:
    """Text of such words: no blank before closing signs, after opening brackets, inside double quotes."""
    text = NO_SPACE_AFTER.sub(r"\1", NO_SPACE_BEFORE.sub(r"\1", " ".join(words)))
    return QUOTED.sub(r"\1\2\3", text)


def _read(folder: Path, split: str, form: str, language: str, lowercase: bool) -> list[str]:
    name = f"{split}{MARKS[form]}.{language}"
    files = [file for file in (folder / name, folder / f"{name}.gz") if file.is_file()]
    if not files:
        raise UserError(
            f"data.options.path is {folder}, which has no {name} nor {name}.gz: "
            f"give the folder of Multi30k's {form} text, or choose form, test, source and target by its files"
        )
    lines = [line for line in read_lines(files[0], refuse("multi30k", folder)) if line]
    return [line.lower() for line in lines] if lowercase else lines


def check(path: Path, findings: Findings) -> None:
    """Count sentences and tokens of every file, and the training words; report bad lines and uneven pairs."""
    lines_of: dict[str, dict[str, int]] = defaultdict(dict)
    for file in sorted(path.iterdir()) if path.is_dir() else []:
        if named := FILE.fullmatch(file.name):
            part, language = named.groups()
            lines_of[part][language] = _check_file(file, f"{part}.{language}", findings)
    if not lines_of:
        findings.problem(str(path), "has no files such as train.en, train.en.gz or train.lc.norm.tok.en")
    for part, counts in lines_of.items():
        if len(set(counts.values())) > 1:
            findings.problem(str(path / part), f"has unequal numbers of lines: {counts}", "unequal pairs")
        if len(counts) == 1:
            findings.problem(str(path / part), f"is there in one language only: {next(iter(counts))}", "unpaired")


def _check_file(file: Path, name: str, findings: Findings) -> int:
    """Lines of a file, good and bad."""
    words_of = str.split if MARKS["tokenised"] in file.name else tokenise
    vocabulary: Counter[str] = Counter()
    number = 0
    for number, line in enumerate(read_lines(file, findings.problem), 1):
        if line is None:
            continue
        words = words_of(line)
        vocabulary.update(words)
        findings.count(f"{name} sentences")
        if len(words) > LONGEST:
            findings.problem(f"{file}:{number}", f"has {len(words)} words, over {LONGEST}", "over-long")
    findings.count(f"{name} tokens", vocabulary.total())
    if name.startswith("train"):
        findings.count(f"{name} vocabulary", len(vocabulary))
    return number
