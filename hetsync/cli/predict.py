"""`hetsync predict` and `hetsync test`: a trained run on its test data, on any number of ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hetsync.cli.shared import Verbs, add_recipe_command, on_all_ranks
from hetsync.config.parser import look_ahead, make_run_parser, parse_recipe
from hetsync.config.schema import Config
from hetsync.errors import UserError, early_mistakes
from hetsync.files import PREDICTIONS, RECIPE, TEST, json_text, write_atomically
from hetsync.start import loading

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from hetsync.plane.base import Plane
    from hetsync.train.tested import Request, RunMetrics


def add_to(verbs: Verbs) -> None:
    add_recipe_command(verbs, "test", "say what trained runs are worth on their test data", main_test)
    add_recipe_command(verbs, "predict", "the same, and write each prediction to a file", main_predict)


def main_test(argv: Sequence[str]) -> NoReturn:
    main("test", argv)


def main_predict(argv: Sequence[str]) -> NoReturn:
    main("predict", argv)


def main(verb: str, argv: Sequence[str]) -> NoReturn:
    with early_mistakes():
        runs, told = parse(verb, argv)
    sys.exit(on_all_ranks(runs[0][1], lambda plane: evaluate(plane, runs, told, verb == "predict")))


def evaluate(plane: Plane, runs: Sequence[tuple[Path, Config]], told: Any, predicts: bool) -> int:
    """Collective."""
    with loading():
        from hetsync.train.tested import Request

    output = Path(told.output) if predicts and told.output else None
    return evaluate_runs(plane, runs, Request(told.part, told.weights, predicts), output)


def parse(verb: str, argv: Sequence[str]) -> tuple[list[tuple[Path, Config]], Any]:
    """Run folders with their recipes, and what else the words say. UserError for a mistake."""
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
        config, told = parse_recipe(parser, argv, _recipe_in(folder))
        runs.append((folder, config))
    if verb == "predict" and told.output and len(runs) > 1:
        raise UserError(f"--output is {told.output}, but there are {len(runs)} runs: leave it out, or name one run")
    return runs, told


def _recipe_in(folder: Path) -> Path:
    """UserError where there is none, or none to be seen."""
    recipe = folder / RECIPE
    try:
        recipe.stat()
    except FileNotFoundError:
        raise UserError(f"{folder}: there is no {RECIPE} in it; give the folder of a run of hetsync-train") from None
    except OSError as error:
        raise UserError(f"{recipe} cannot be read: {error.strerror}") from error
    return recipe


def evaluate_runs(
    plane: Plane, runs: Sequence[tuple[Path, Config]], request: Request, output: Path | None = None
) -> int:
    """Collective: one after the other, and what all come to. `output`: of predictions, in place of one in each run's
    folder."""
    from hetsync.cli.metric_tables import show_all

    found = [evaluate_one(plane, folder, config, request, output) for folder, config in runs]
    if plane.rank == 0 and len(found) > 1:
        show_all(found)
    return 0


def evaluate_one(plane: Plane, folder: Path, config: Config, request: Request, output: Path | None) -> RunMetrics:
    """Collective."""
    from hetsync.cli.metric_tables import show
    from hetsync.plane.base import decided_by_first, made_by_all
    from hetsync.train.rows_file import RowsFile
    from hetsync.train.tested import evaluate_run

    path = output or folder / (PREDICTIONS if request.part == "test" else f"predictions-{request.part}.parquet")
    writes = request.predicts and plane.rank == 0
    file = made_by_all(plane, lambda: RowsFile(path) if writes else None)
    with file.written() if file is not None else contextlib.nullcontext():
        tested = evaluate_run(plane, config, folder, request, file)
    if plane.rank == 0:
        show(folder, tested)
    if file is not None:
        print(f"{file.path}: {file.rows:,} rows")
    if request.part == "test":
        text = json_text(asdict(tested))
        decided_by_first(plane, lambda: write_atomically(folder / TEST, text, "let it be written there"))
    return tested
