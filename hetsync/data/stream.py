"""An iterable data set as one whose samples have numbers, so that each can be used once, whichever rank takes it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from hetsync.errors import UserError


def is_stream(data: Any) -> bool:
    """Does it give samples one after another only?"""
    if isinstance(data, IterableDataset):
        return True
    return not hasattr(data, "__getitem__") and (hasattr(data, "__iter__") or hasattr(data, "read"))


class Stream(Dataset[Any]):
    """The first samples of an iterable data set, by their place in it.

    Where the data set has `read(start, stop)`, which gives the samples of these places, it is asked for them. Otherwise
    each reader (a rank, or each of its workers) goes through all samples and keeps those that it is asked for; for an
    earlier place than the reader's the data set is iterated anew, and must give the same samples again.
    """

    def __init__(self, data: Any, samples: int) -> None:
        """UserError for what can be read only once."""
        if not hasattr(data, "read") and isinstance(data, Iterator):
            raise UserError(
                f"the training data is a {type(data).__name__}, which can be read only once: give a data set whose"
                " __iter__ begins anew, as a resumed run needs it"
            )
        self.data = data
        self._samples = samples
        self._reader: Iterator[Any] | None = None
        self._place = 0  # of the reader's next sample

    def __len__(self) -> int:
        return self._samples

    @property
    def is_walked(self) -> bool:
        """Is there no other way to a place than through all before it?"""
        return not hasattr(self.data, "read")

    def next_places(self, samples: int) -> list[int]:
        """Those behind the last one that was walked to, and after the end the first."""
        return [(self._place + index) % self._samples for index in range(samples)]

    def __getstate__(self) -> dict[str, Any]:
        """Workers have readers of their own."""
        return {**self.__dict__, "_reader": None, "_place": 0}

    def __getitem__(self, index: int) -> Any:
        return self._read(index, index + 1)[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        items: list[Any] = []
        for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):  # neighbours in one go
            places = [index for _, index in run]
            items += self._read(places[0], places[-1] + 1)
        return items

    def _read(self, start: int, stop: int) -> list[Any]:
        read = getattr(self.data, "read", None)
        items = list(read(start, stop)) if read is not None else self._walk(start, stop)
        if len(items) < stop - start:
            known = bool(items) or read is None or not start
            self._fail(f"{'' if known else 'at most '}{start + len(items)}")
        return items

    def _walk(self, start: int, stop: int) -> list[Any]:
        if self._reader is None or start < self._place:
            self._reader, self._place = iter(self.data), 0
        skipped = sum(1 for _ in islice(self._reader, start - self._place))
        if skipped < start - self._place:
            self._fail(f"{self._place + skipped}")
        items = list(islice(self._reader, stop - start))
        self._place = start + len(items)
        return items

    def _fail(self, found: str) -> None:
        raise UserError(
            f"the training data has {found} samples, but {self._samples} are to be read: give job.loader no more"
            " samples than there are, and loop over job.epochs to read them again"
        )
