"""`hetsync data`: what it prints, and its exit status."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetsync.cli import data_sets as commands
from hetsync.cli import main as cli
from hetsync.data.catalogue import CATALOGUE, Download, Entry
from hetsync.data.download import Progress

RECORD = bytes(3073)
BAD_RECORD = bytes([99]) + bytes(3072)


def said(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Exit status, output, complaints."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", *map(str, words)])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_check_of_what_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(RECORD * 1200)
    status, out, err = said(capsys, "check", "cifar10", tmp_path)
    assert (status, err) == (0, "")
    assert "nothing is wrong" in out
    (line,) = [line for line in out.splitlines() if "training images" in line]
    assert "1,200" in line


@pytest.mark.parametrize(("words", "shown"), [([], commands.SHOWN), (["--all"], 50)])
def test_check_of_what_is_wrong(
    words: list[str], shown: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes((RECORD + BAD_RECORD) * 50)
    status, out, err = said(capsys, "check", "cifar10", tmp_path, *words)
    assert (status, err) == (1, "")
    assert out.count("label 99 is not 0 to 9") == shown
    assert f"{tmp_path / 'data_batch_1.bin'}, record 2: label 99" in out
    assert ("... and 30 more problems; --all prints them" in out) == (shown < 50)
    (line,) = [line for line in out.splitlines() if "labels out of range" in line]
    assert " 50 " in line


MISTAKES = {
    "unknown set": (["check", "cifar11", "."], "there is no data set cifar11: use one of cifar10, deeptte"),
    "unknown set to fetch": (["download", "imagenet"], "there is no data set imagenet: use one of"),
    "no path": (["check", "cifar10", "{}/nowhere"], "nowhere does not exist: give the folder"),
    "nothing to check": (["check", "digits", "."], "digits has no files to check: it is part of scikit-learn"),
    "path missing": (["check", "cifar10"], "the following arguments are required: PATH; see hetsync data check --help"),
    "no verb": ([], "required: VERB; see hetsync data --help"),
    "word too many": (["check", "cifar10", ".", "more"], "unrecognized arguments: more; see hetsync --help"),
    "ptb": (["download", "ptb"], "ptb is not for download: .*Linguistic Data Consortium.*must hold ptb.train.txt"),
    "multi30k": (
        ["download", "multi30k"],
        "not for download: .*non-commercial.*github.com/multi30k.*must hold train.en",
    ),
    "deeptte": (["download", "deeptte"], "not for download: no licence is stated .*UrbComp/DeepTTE.*JSON lines"),
    "geolife": (["download", "geolife"], r"not for download: .*Microsoft Research.*USER/Trajectory/\*\.plt"),
    "synthetic": (["download", "synthetic_city"], "not for download: it is made on the spot"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_a_sentence(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, sentence = MISTAKES[case]
    status, out, err = said(capsys, *(word.format(tmp_path) for word in words))
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert re.search(f"^hetsync: .*{sentence}", err), err


def test_download(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    files = (Download("https://example.org/set.tar.gz", "0" * 64),)
    monkeypatch.setitem(CATALOGUE, "made", Entry("", downloads=files, terms="free for all"))
    asked = []

    def fetch(files: tuple[Download, ...], folder: Path, show: Progress) -> None:
        asked.append((files, folder))
        show("set.tar.gz", 5, 10)

    monkeypatch.setattr(commands, "fetch", fetch)
    for words, folder in (([], Path("data/made")), (["--to", str(tmp_path)], tmp_path)):
        status, out, err = said(capsys, "download", "made", *words)
        assert (status, err) == (0, "")
        assert f"made is in {folder}; free for all" in out
        assert asked.pop() == (files, folder)


def test_an_interrupted_download_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "fetch", fetch)
    assert said(capsys, "download", "cifar10", "--to", "nowhere")[::2] == (130, "hetsync: interrupted\n")
