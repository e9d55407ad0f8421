"""Damaged inputs of every kind work or are refused in a sentence. Thousands: python -m benchmarks.fuzz.run"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.fuzz.inputs import KINDS, Kind
from benchmarks.fuzz.mutations import mutate
from benchmarks.fuzz.run import sound_inputs, try_case

CASES = 12  # of each kind


@pytest.mark.each_value(5)
@pytest.mark.parametrize("kind", [name for name in KINDS if not name.startswith("page")])  # a page takes 0.3 s
def test_a_damaged_input_works_or_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # put back afterwards
    with sound_inputs([kind]) as sound:
        cases = [try_case(kind, sound[kind], f"unit/{number}") for number in range(CASES)]
    assert not [f"{case.seed}: {case.told}" for case in cases if case.outcome == "failed"]
    assert Counter(case.outcome for case in cases)["refused"] + (kind == "run folder") > 0, "nothing was damaged"


@pytest.mark.parametrize("error", [KeyError("rank"), SystemExit(2)])
def test_what_is_no_sentence_is_a_failure_and_is_kept(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(folder: Path) -> None:
        raise error

    monkeypatch.setitem(KINDS, "broken", Kind(lambda folder: None, read))
    (tmp_path / "sound").mkdir()
    (tmp_path / "sound" / "a.yaml").write_text("a: 1\n")
    case = try_case("broken", tmp_path / "sound", "0/7", tmp_path / "kept")
    assert case.outcome == "failed"
    assert type(error).__name__ in case.told
    kept = (tmp_path / "kept" / "broken 0-7" / "a.yaml").read_bytes()
    (tmp_path / "b.yaml").write_text("a: 1\n")
    mutate(tmp_path / "b.yaml", _after_the_choice("0/7"))
    assert kept == (tmp_path / "b.yaml").read_bytes(), "a seed makes the same damage"


def _after_the_choice(seed: str) -> random.Random:
    source = random.Random(seed)
    source.choice([0])
    return source
