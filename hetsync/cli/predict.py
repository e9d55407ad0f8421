"""`hetsync predict` and `hetsync test`: a trained run on its test data, on any number of ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hetsync.cli.shared import Verbs, add_recipe_command, on_all_ranks
from hetsync.config.parser import look_ahead, make_run_parser, parse_recipe
from hetsync.config.schema import Config
from hetsync.errors import UserError, early_mistakes
from hetsync.files import PREDICTIONS, RECIPE, TEST, write_atomically
from hetsync.start import loading

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from hetsync.data import Part
    from hetsync.plane.base import Plane
    from hetsync.train.tested import Tested, Weights


def add_to(verbs: Verbs) -> None:
    add_recipe_command(verbs, "test", "say what trained runs are worth on their test data", main_test)
    add_recipe_command(verbs, "predict", "the same, and write each prediction to a file", main_predict)


def main_test(argv: Sequence[str]) -> NoReturn:
    main("test", argv)


def main_predict(argv: Sequence[str]) -> NoReturn:
    main("predict", argv)


def main(verb: str, argv: Sequence[str]) -> NoReturn:
    with early_mistakes():
        runs, asked = parse(verb, argv)
    sys.exit(on_all_ranks(runs[0][1], lambda plane: look_at_runs(plane, runs, asked)))


@dataclass(frozen=True)
class Asked:
    """`output`: where predictions go; None takes a file in each run folder."""

    part: Part
    weights: Weights | None
    predicts: bool
    output: Path | None


def parse(verb: str, argv: Sequence[str]) -> tuple[list[tuple[Path, Config]], Asked]:
    """Run folders with their recipes, and what is asked of them. UserError for a mistake."""
    what = {
        "test": "Metrics of trained runs on their test data, beside those of naive predictors; of several runs (seeds,"
        " say) also mean and deviation.",
        "predict": "Predictions of a trained run on its test data, to a file; and its metrics, as hetsync test.",
    }
    parser = make_run_parser(f"hetsync {verb}", what[verb])
    parser.add_argument("--part", choices=["test", "validation", "train"], default="test", help="Part of the data.")
    parser.add_argument(
        "--weights", choices=["best", "newest"], help="Weights of the run; null takes the best, where it has kept any."
    )
    if verb == "predict":
        help_text = f"Where to write: a .parquet or .csv file; null takes {PREDICTIONS} in the run folder."
        parser.add_argument("--output", metavar="FILE", help=help_text)
    runs = []
    folders = [Path(folder) for folder in look_ahead(parser, argv).run_folders or []]
    if not folders:
        raise UserError(f"hetsync {verb} got no run: give the run folder of a job, such as runs/NAME-DATE-TIME")
    for folder in folders:
        if not (folder / RECIPE).is_file():
            raise UserError(f"{folder}: there is no {RECIPE} in it; give the folder of a run of hetsync-train")
        config, told = parse_recipe(parser, argv, folder / RECIPE)
        runs.append((folder, config))
    output = Path(told.output) if verb == "predict" and told.output else None
    if output is not None and len(runs) > 1:
        raise UserError(f"--output is {output}, but there are {len(runs)} runs: leave it out, or name one run")
    return runs, Asked(told.part, told.weights, verb == "predict", output)


def look_at_runs(plane: Plane, runs: Sequence[tuple[Path, Config]], asked: Asked) -> int:
    """Collective: one after the other, and what all come to."""
    with loading():
        from hetsync.cli.metric_tables import show, show_all

    found = []
    for folder, config in runs:
        tested = look_at_run(plane, config, folder, asked)
        found.append(tested)
        if plane.rank == 0:
            show(folder, tested)
    if plane.rank == 0 and len(found) > 1:
        show_all(found)
    return 0


def look_at_run(plane: Plane, config: Config, folder: Path, asked: Asked) -> Tested:
    from hetsync.plane.base import decided_by_first
    from hetsync.train.rows_file import RowsFile
    from hetsync.train.tested import as_json, look_at

    output = asked.output or folder / PREDICTIONS
    rows = RowsFile(output) if asked.predicts else None
    with rows.written() if rows is not None and plane.rank == 0 else contextlib.nullcontext():
        found = look_at(plane, config, folder, asked.part, asked.weights, rows)
    if asked.part == "test":
        decided_by_first(plane, lambda: write_atomically(folder / TEST, as_json(found)))
    if rows is not None and plane.rank == 0:
        print(f"{rows.path}: {rows.rows:,} rows")
    return found
