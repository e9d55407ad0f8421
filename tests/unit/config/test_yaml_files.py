"""YAML that users write: what it may hold, and that everything else ends soon, in one short sentence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hetsync.config.parser import make_parser, parse_recipe, read_recipe
from hetsync.config.recipe_file import settings
from hetsync.config.yaml_files import DEEPEST, FLOAT_PATTERN, LARGEST_BYTES, MOST_VALUES, load_yaml, read_yaml
from hetsync.emulation.cluster import load_cluster
from hetsync.errors import UserError, one_sentence
from hetsync.simulate.script import load_script

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)

REFUSED = {
    "alias bomb": (BOMB, "line 5: more than 40,000 keys and values"),
    "merge bomb": (BOMB.replace("[", "{<<: [").replace("]", "]}").replace("x", "{k: v}"), "more than 40,000"),
    "cycle": ("a: &a [1, *a]", r"line 1: \*a is part of what it stands for"),
    "deep brackets": ("a: " + "[" * 3000 + "]" * 3000, f"line 1: more than {DEEPEST} levels"),
    "deep dashes": ("- " * 3000 + "x", f"more than {DEEPEST} levels"),
    "long integer": ("a: " + "7" * 5000, r"line 1: 7{100}\.\.\. \(5,000 characters\) is no number"),
    "long hexadecimal": ("a: 0x" + "f" * 5000, "is no number"),
    "hexadecimal of nothing": ("a: 0x_", "0x_ is no number"),
    "key twice": ("a: 1\nb: {c: 1,\n  c: 2}", "line 3: key c is there twice"),
    "tag": ("a: !!python/object:os.system x", "os.system is a tag"),
    "number by tag": ("a: !!int ''", "is a tag"),
    "two documents": ("a: 1\n---\nb: 2", "line 2"),
    "star without quotes": ("a: [*]", r"what begins with \* needs quotes: '*'"),
    "no anchor": ("a: *b", "line 1: found undefined alias"),
    "list as key": ("? [1]\n: 2", "unhashable"),
    "control character": ("a: \x07", "special characters are not allowed"),
    "many values": ("[" + "1," * MOST_VALUES + "]", "more than 40,000"),
    "large": (" " * (LARGEST_BYTES + 1), "more than 1,048,576 bytes"),
    "not UTF-8": (b"a: \xff", "it must be a YAML file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    content, problem = REFUSED[case]
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=rf"cannot read recipe mine: .*{problem}") as refused:
        read_yaml(path, "recipe mine")
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("case", ["alias bomb", "cycle", "deep brackets", "long integer", "key twice"])
def test_all_readers_refuse_it(case: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(str(REFUSED[case][0]))
    for read in (lambda: load_cluster(str(path)), lambda: load_script(path, 2)):
        with pytest.raises(UserError, match=r"mine\.yaml: line \d"):
            read()
    with pytest.raises(UserError, match=r"mine\.yaml: line \d"):
        read_recipe(path)
    with pytest.raises(UserError, match=r"model\.options is") as refused:
        parse_recipe(make_parser("any", ""), [f"--model.options={REFUSED[case][0]}"])
    assert len(one_sentence(str(refused.value))) < 300


def test_what_is_taken() -> None:
    numbers = "[1e-3, 1e4, 1.5e3, 2.0, .5, 0x10, 0b11, 010, -0_10, 1_000, 00, 089, 1:30, .inf, 2026-11-23, yes]"
    told = load_yaml(f"a: &x {{b: 1}}\nc: *x\nd: {{<<: *x, b: 2}}\ne: {{<<: *x}}\nf: {numbers}")
    assert told["c"] == {"b": 1}
    assert told["d"] == {"b": 2}
    assert told["e"] == {"b": 1}
    values = [0.001, 10000, 1500, 2.0, 0.5, 16, 3, 10, -10, 1000, 0, "089", "1:30", math.inf, "2026-11-23", True]
    assert told["f"] == values
    assert [type(value) for value in told["f"]] == [type(value) for value in values]


def test_a_leading_zero_means_nothing(tmp_path: Path) -> None:
    """As on the command line."""
    path = tmp_path / "mine.yaml"
    path.write_text("run: {seed: 010}")
    assert read_recipe(path).run.seed == parse_recipe(make_parser("any", ""), ["--run.seed=010"])[0].run.seed == 10


def test_many_pins_are_taken() -> None:
    pins = {rank: 3 for rank in range(10_000)}
    assert load_yaml(yaml.safe_dump(pins)) == pins


TEXT = st.text(max_size=9).filter(lambda text: not FLOAT_PATTERN.match(text))  # PyYAML writes 1e3 without quotes
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@hypothesis.settings(deadline=None, max_examples=60)
@given(PLAIN)
def test_what_is_written_reads_back(value: Any) -> None:
    assert load_yaml(yaml.safe_dump(value)) == value


KEYS = sorted(key for key, _ in settings())


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """A recipe from its dotted keys."""
    recipe: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        section = recipe
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return recipe


PARSER = make_parser("any", "")
RECIPES = st.dictionaries(st.sampled_from(KEYS), PLAIN, min_size=1, max_size=3).map(nested)


@hypothesis.settings(deadline=None, max_examples=60)
@given(RECIPES | st.dictionaries(st.text(max_size=5), PLAIN, max_size=2))
def test_any_recipe_is_taken_or_refused(tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]) -> None:
    """Nothing else is raised, whatever a recipe holds."""
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(content))
    refused = ""
    try:
        parse_recipe(PARSER, [str(path)])
    except UserError as mistake:
        refused = str(mistake)
    assert len(one_sentence(refused)) <= 1000


DEVICES = st.lists(
    st.dictionaries(st.sampled_from(["name", "count", "speed", "memory_gib", "cuont"]), PLAIN), max_size=2
)
PARTS = st.sampled_from(["name", "source", "devices", "link", "jitter", "events", "distribution", "sigma", "rank"])


@hypothesis.settings(deadline=None, max_examples=60)
@given(st.dictionaries(PARTS, PLAIN | DEVICES | st.dictionaries(PARTS, PLAIN, max_size=3)))
def test_any_profile_is_taken_or_refused(tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(content))
    refused = ""
    try:
        load_cluster(str(path))
    except UserError as mistake:
        refused = str(mistake)
    assert len(refused) < 1000
