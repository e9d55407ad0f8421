"""PTB and Multi30k: every token once, BLEU as sacrebleu's, bad files told line by line."""

from __future__ import annotations

import gzip
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sacrebleu.metrics.bleu import BLEU
from told import Told

from hetsync import extras
from hetsync.data import Data, build, on_part
from hetsync.data.evaluation import evaluate_range
from hetsync.data.findings import Findings
from hetsync.data.sets import multi30k, ptb
from hetsync.data.sets.vocabulary import END_ID, PAD_ID, UNKNOWN_ID, Vocabulary, perplexity
from hetsync.data.workers import fetch
from hetsync.errors import UserError

REAL = Path(os.environ.get("HETSYNC_TEST_DATA", Path(__file__).parents[3] / "../shared/data"))


def write_ptb(folder: Path, **texts: str) -> Path:
    made = {"train": " a b <unk>\n b c \n", "valid": " a c\n", "test": " c b a\n a <unk>\n"}
    for split, text in {**made, **texts}.items():
        (folder / f"ptb.{split}.txt").write_text(text, encoding="utf-8")
    return folder


def write_pairs(folder: Path) -> Path:
    files = {
        "train.lc.norm.tok.en": "a dog runs .\na cat\nthe dog sleeps here .\n",
        "train.lc.norm.tok.de": "ein hund rennt .\neine katze\nder hund schläft hier .\n",
        "val.lc.norm.tok.en": "a cat runs .\n",
        "val.lc.norm.tok.de": "eine katze rennt .\n",
        "test_2016_flickr.lc.norm.tok.en": "a dog sleeps here .\nthe cat runs here .\na cat .\n",
        "test_2016_flickr.lc.norm.tok.de": "ein hund schläft hier .\ndie katze rennt hier .\neine katze .\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


class Uniform(torch.nn.Module):
    """Every word alike, for both kinds of data; translates each source into itself."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.scores = torch.nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens: torch.Tensor, more: object, targets: torch.Tensor | None = None) -> torch.Tensor:
        shape = targets.shape if targets is not None else (len(tokens), more)
        return self.scores.expand(*shape, len(self.scores))

    def translate(self, source: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        ended = torch.arange(source.shape[1] + 1) >= lengths[:, None]
        return torch.nn.functional.pad(source, (0, 1)).masked_fill(ended, END_ID)[:, :longest]


def evaluated(model: torch.nn.Module, data: Data, cuts: list[int]) -> dict[str, float]:
    sums: dict[str, float] = {"samples": len(data.test)}
    for start, stop in zip([0, *cuts], [*cuts, len(data.test)], strict=True):
        for name, value in evaluate_range(model, on_part(data, "test"), start, stop).items():
            sums[name] = sums.get(name, 0.0) + value
    return data.report(sums)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 9))
def test_windows_predict_every_token_once_from_those_before_it(length: int, window: int, context: int) -> None:
    text, end = torch.arange(1, length + 1), 0
    tokens, targets = ptb.windows(text, window, context, end).tensors
    assert targets[targets != ptb.NO_TARGET].tolist() == text.tolist()
    assert tokens.shape == (len(targets), context + window)
    for row, aims in zip(tokens.tolist(), targets.tolist(), strict=True):
        aim = aims[0]  # words are numbered as they stand, so what precedes n is n - 1, and <eos> before the text
        known = row[: context + sum(each != ptb.NO_TARGET for each in aims)]
        assert known == [max(end, aim - 1 - context + i) for i in range(len(known))]


def test_perplexity_of_a_uniform_model_is_the_vocabulary(tmp_path: Path) -> None:
    data = build("ptb", {"path": str(write_ptb(tmp_path)), "window": 4, "context": 2})
    assert data.model_options == {"vocabulary": 5}  # a b c <unk> <eos>
    assert len(data.test) == 2  # 7 tokens: the last window is short
    for cuts in ([], [1]):
        report = evaluated(Uniform(5), data, cuts)
        assert report == pytest.approx({"perplexity": 5, "loss": math.log(5)})


def test_a_row_is_a_token_at_its_place_in_a_window(tmp_path: Path) -> None:
    data = build("ptb", {"path": str(write_ptb(tmp_path)), "window": 4, "context": 2})
    batch = data.test[:]
    scores = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    rows = ptb.rows(Told(scores), batch)
    assert rows["position"].tolist() == [0, 1, 2, 3] * 2
    expected = -scores.log_softmax(2).flatten(0, 1)[torch.arange(7), batch[1].flatten()[:7]]
    torch.testing.assert_close(rows["loss"][:7], expected)
    assert rows["loss"][7].isnan()  # the last window is short


def test_diverged_models_have_infinite_perplexity() -> None:
    assert perplexity(1e9, 10) == math.inf
    assert perplexity(math.nan, 10) == math.inf


def test_ptb_unknown_words_and_splits(tmp_path: Path) -> None:
    folder = str(write_ptb(tmp_path, valid="strange b\n"))
    data = build("ptb", {"path": folder, "window": 3, "context": 0})
    train = ptb.ptb(folder, window=7, context=0).train
    unknown = train.tensors[1][0, 2]
    assert data.validation.tensors[1][0, 0] == unknown
    assert data.evaluated is data.validation


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"window": 0}, "window 0"),
        ({"path": "nowhere"}, "no ptb.train.txt"),
    ],
)
def test_ptb_wrong_options(tmp_path: Path, change: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build("ptb", {"path": str(write_ptb(tmp_path)), **change})


def test_ptb_check_goes_on_after_bad_lines(tmp_path: Path) -> None:
    write_ptb(tmp_path, valid="a z\n\nb\n")
    (tmp_path / "ptb.test.txt").write_bytes(b"a b\n\xff\xfe\n" + b"a " * 300)
    told: list[str] = []
    findings = Findings(lambda where, what: told.append(f"{Path(where).name} {what}"))
    ptb.check(tmp_path, findings)
    (tmp_path / "ptb.valid.txt").write_text("a c\n")
    assert told == [
        "ptb.valid.txt:1 has words unknown in training: ['z']",
        "ptb.valid.txt:2 is empty",
        "ptb.test.txt:2 is not UTF-8",
        "ptb.test.txt:3 has 300 words, over 200",
    ]
    assert findings.counts["valid sentences"] == 2
    assert findings.counts["train tokens with <eos>"] == 7
    assert findings.counts["vocabulary"] == 5
    with pytest.raises(UserError, match=r"ptb.test.txt:2 is not UTF-8: see `hetsync data check ptb"):
        build("ptb", {"path": str(tmp_path)})


def test_checks_tell_of_missing_files(tmp_path: Path) -> None:
    for check, problems in ((ptb.check, 3), (multi30k.check, 1)):
        findings = Findings()
        check(tmp_path / "nowhere", findings)
        assert findings.problems.total() == problems


def test_vocabulary_takes_the_most_frequent_of_training(tmp_path: Path) -> None:
    words = Vocabulary.most_frequent([["b", "a", "c"], ["c", "b"]], 3, special=("<unk>",))
    assert words.decode(range(len(words))) == ["<unk>", "b", "c"]
    assert words.encode(["c", "a"]) == [2, 0]


def test_multi30k_batches(tmp_path: Path) -> None:
    data = build("multi30k", {"path": str(write_pairs(tmp_path)), "vocabulary": 9})
    assert data.model_options == {"source_vocabulary": 9, "target_vocabulary": 9}
    assert list(data.costs or []) == [8, 4, 10]
    batch = fetch(pickle.loads(pickle.dumps(data.train)), [1, 0], data.collate)
    assert batch.source_BS.shape == (2, 4)
    assert batch.target_BT.shape == (2, 6)
    assert batch.lengths_B.tolist() == [2, 4]
    assert (batch.source_BS[0] == PAD_ID).tolist() == [False, False, True, True]
    assert batch.target_BT[0, 3] == END_ID
    assert UNKNOWN_ID in batch.source_BS  # nine words do not hold all


def test_longer_training_pairs_are_left_out(tmp_path: Path) -> None:
    data = build("multi30k", {"path": str(write_pairs(tmp_path)), "longest": 4})
    assert [len(part) for part in (data.train, data.validation, data.test)] == [2, 1, 3]
    (pair,) = data.validation
    assert data.test[0][0] == pair[0] + 1  # its references are the next ones
    with pytest.raises(UserError, match="longest is 1"):
        build("multi30k", {"path": str(tmp_path), "longest": 1})


def test_bleu_from_sums_is_that_of_the_corpus(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path)
    data = build("multi30k", {"path": str(folder), "source": "de", "target": "de"})
    size = data.model_options["target_vocabulary"]
    references = (folder / "test_2016_flickr.lc.norm.tok.de").read_text(encoding="utf-8").splitlines()
    translations = [line.replace("die", "<unk>") for line in references]  # not a training word
    expected = BLEU(tokenize="none", force=True).corpus_score(translations, [references]).score
    assert 50 < expected < 100
    for cuts in ([], [1], [1, 2]):
        report = evaluated(Uniform(size), data, cuts)
        assert report["bleu"] == pytest.approx(expected)
        assert report["perplexity"] == pytest.approx(size)


def test_raw_text_is_detokenised_for_bleu(tmp_path: Path) -> None:
    lines = 'Ein "kleiner" Hund (braun), 2-jährig, schläft!\nDer Hund kann\'s nicht: Limonade- und Bierdosen.\n'
    for name in ("train.de.gz", "val.de.gz", "test_2016_flickr.de.gz"):
        (tmp_path / name).write_bytes(gzip.compress(lines.encode()))
    options = {"path": str(tmp_path), "form": "raw", "source": "de", "target": "de"}
    data = build("multi30k", options)
    assert evaluated(Uniform(data.model_options["target_vocabulary"]), data, [])["bleu"] == pytest.approx(100)
    for line in lines.splitlines():
        assert multi30k.detokenise(multi30k.tokenise(line)) == line
    lowered = build("multi30k", {**options, "lowercase": True})
    assert lowered.model_options["target_vocabulary"] <= data.model_options["target_vocabulary"]


def test_multi30k_without_sacrebleu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install sacrebleu"):
        build("multi30k", {"path": str(write_pairs(tmp_path))})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"form": "xml"}, "form is xml"),
        ({"form": "raw"}, "no train.en nor train.en.gz"),
        ({"vocabulary": 4}, "vocabulary 4"),
        ({"test": "test_2030"}, "no test_2030.lc.norm.tok.en"),
    ],
)
def test_multi30k_wrong_options(tmp_path: Path, change: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build("multi30k", {"path": str(write_pairs(tmp_path)), **change})


def test_multi30k_check_goes_on_after_bad_lines(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    with (tmp_path / "train.lc.norm.tok.de").open("ab") as file:
        file.write(b"\n\xff\n" + b"wort " * 101)
    (tmp_path / "val.en.gz").write_bytes(gzip.compress(b"some text")[:-9])
    told: list[str] = []
    findings = Findings(lambda where, what: told.append(f"{Path(where).name} {what}"))
    multi30k.check(tmp_path, findings)
    assert told[:3] == [
        "train.lc.norm.tok.de:4 is empty",
        "train.lc.norm.tok.de:5 is not UTF-8",
        "train.lc.norm.tok.de:6 has 101 words, over 100",
    ]
    assert told[3].startswith("val.en.gz cannot be read")
    assert told[4:] == [
        "train.lc.norm.tok has unequal numbers of lines: {'de': 6, 'en': 3}",
        "val is there in one language only: en",
    ]
    assert findings.counts["train.lc.norm.tok.en sentences"] == 3
    with pytest.raises(UserError, match=r"train.lc.norm.tok.de:4 is empty: see `hetsync data check multi30k"):
        build("multi30k", {"path": str(tmp_path)})


def test_multi30k_refuses_uneven_pairs(tmp_path: Path) -> None:
    (write_pairs(tmp_path) / "train.lc.norm.tok.de").write_text("ein hund\n", encoding="utf-8")
    with pytest.raises(UserError, match="has 3 lines of en and 1 of de"):
        build("multi30k", {"path": str(tmp_path)})


@pytest.mark.skipif(not (REAL / "ptb").is_dir(), reason="needs the Penn Treebank's text")
def test_real_ptb() -> None:
    data = build("ptb", {"path": str(REAL / "ptb")})
    assert data.model_options == {"vocabulary": 10000}
    for split, tokens in ((data.train, 929_589), (data.test, 82_430)):
        assert (split.tensors[1] != ptb.NO_TARGET).sum() == tokens
    findings = Findings()
    ptb.check(REAL / "ptb", findings)
    assert not findings.problems
    assert [findings.counts[f"{split} sentences"] for split in ptb.SPLITS] == [42068, 3370, 3761]


@pytest.mark.skipif(not (REAL / "multi30k_en_de").is_dir(), reason="needs Multi30k's text")
@pytest.mark.parametrize("form", ["raw", "tokenised"])
def test_real_multi30k(form: str) -> None:
    data = build("multi30k", {"path": str(REAL / "multi30k_en_de"), "form": form})
    assert (len(data.train), len(data.test)) == (29000, 1000)
    assert data.model_options == {"source_vocabulary": 8000, "target_vocabulary": 8000}


@pytest.mark.skipif(not (REAL / "multi30k_en_de").is_dir(), reason="needs Multi30k's text")
def test_real_multi30k_check() -> None:
    findings = Findings()
    multi30k.check(REAL / "multi30k_en_de", findings)
    assert not findings.problems
    assert findings.counts["train.en sentences"] == findings.counts["train.lc.norm.tok.de sentences"] == 29000
