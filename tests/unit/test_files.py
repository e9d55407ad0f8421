"""JSON that any reader takes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from hetsync.files import json_text


def test_finite_values_are_written_as_they_are() -> None:
    assert json_text({"a": [1, 2.5, None, "text", True]}) == '{"a": [1, 2.5, null, "text", true]}'


@pytest.mark.parametrize("value", [math.inf, -math.inf, np.float64("inf")])
def test_infinities_are_texts_that_are_numbers_again(value: float) -> None:
    found = json.loads(json_text({"a": (value, {"b": value}), "c": 1.5}), parse_constant=pytest.fail)
    assert found["c"] == 1.5
    assert [float(found["a"][0]), float(found["a"][1]["b"])] == [value, value]


def test_nan_is_a_text() -> None:
    assert json_text([math.nan]) == '["nan"]'
