"""A table that is written piece by piece: Parquet or CSV, by pyarrow; complete or absent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hetsync.errors import UserError
from hetsync.extras import require
from hetsync.files import DiskError, check_writable

SUFFIXES = (".parquet", ".csv")


class RowsFile:
    """Columns by name, which are of the same names and kinds each time."""

    def __init__(self, path: Path) -> None:
        """UserError where it cannot be one."""
        if path.suffix not in SUFFIXES:
            raise UserError(f"--output is {path}: name a file that ends in {' or '.join(SUFFIXES)}")
        require("predict", "hetsync predict")
        check_writable(path)
        self.path = path
        self.rows = 0
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._writer: Any = None
        self._schema: Any = None

    @contextmanager
    def written(self) -> Iterator[None]:
        """Inside, rows are written; the file is there after it, unless something has failed. DiskError."""
        try:
            yield
            if self._writer is not None:
                with self._writing():
                    self._writer.close()
                    self._temporary.replace(self.path)
        finally:
            with contextlib.suppress(OSError):
                self._temporary.unlink()

    def write(self, columns: Mapping[str, np.ndarray]) -> None:
        """UserError where they are others than before, or hold what no file does."""
        table = _table(columns)
        with self._writing():
            if self._writer is None:
                self._schema, self._writer = table.schema, self._open(table.schema)
            if table.schema != self._schema:
                first, now = (
                    ", ".join(f"{one.name} ({one.type})" for one in each) for each in (self._schema, table.schema)
                )
                raise UserError(f"data.rows returned columns {now}, after {first}: return the same ones each time")
            self._writer.write_table(table)
        self.rows += table.num_rows

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DiskError(f"cannot write {self.path}: {error.strerror or error}; choose another --output") from error

    def _open(self, schema: Any) -> Any:
        if self.path.suffix == ".csv":
            from pyarrow.csv import CSVWriter

            return CSVWriter(self._temporary, schema)
        from pyarrow.parquet import ParquetWriter

        return ParquetWriter(self._temporary, schema)


def _table(columns: Mapping[str, np.ndarray]) -> Any:
    from pyarrow import ArrowException, array, string, table

    arrays = {}
    for name, column in columns.items():
        try:
            arrays[name] = array(column, string()) if column.dtype == object else array(column)
        except ArrowException as error:
            raise UserError(
                f"data.rows returned {name} as an array of {column.dtype}, which no table holds ({error}): return"
                " numbers, times or text"
            ) from error
    return table(arrays)
