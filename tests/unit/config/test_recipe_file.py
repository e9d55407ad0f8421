"""Recipes of older versions are read; command lines have short forms; mistakes are one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hetsync.config.parser import make_parser, parse_recipe, read_recipe, recipe_of
from hetsync.config.recipe_file import RENAMED, find_recipe, settings, shipped_recipes
from hetsync.config.schema import Config
from hetsync.errors import UserError

OLD = {
    "emulate": "quickstart",
    "control": {
        "least_accumulation": 2,
        "greatest_accumulation": 5,
        "least_delay_bound": 0,
        "greatest_delay_bound": 9,
    },
}


def written(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_keys_were_renamed_to_keys_that_there_are() -> None:
    known = dict(settings())
    assert set(RENAMED.values()) <= set(known)
    assert not set(RENAMED) & set(known)


def test_a_recipe_with_old_keys_is_read(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, OLD))
    assert recipe.emulation.profile == "quickstart"
    control = recipe.control
    assert (control.min_accumulation, control.max_accumulation) == (2, 5)
    assert (control.min_delay_bound, control.max_delay_bound) == (0, 9)


@pytest.mark.parametrize(
    ("profile", "emulation"), [(None, {}), ("quickstart", {}), ("quickstart", {"samples_per_second": 300.0})]
)
def test_an_old_key_keeps_its_new_section(tmp_path: Path, profile: str | None, emulation: dict[str, Any]) -> None:
    recipe = read_recipe(written(tmp_path, {"emulate": profile, "emulation": emulation}))
    assert recipe.emulation.profile == profile
    assert recipe.emulation.samples_per_second == emulation.get("samples_per_second")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"emulate": "a", "emulation": {"profile": "b"}},
            "emulate is now called emulation.profile, and both are there: remove emulate",
        ),
        (
            {"control": {"least_delay_bound": 1, "min_delay_bound": 1}},
            "control.least_delay_bound is now called control.min_delay_bound, and both",
        ),
        ({"emulate": "a", "emulation": 3}, "emulation holds 3 instead of keys with values"),
        ({"control": 3}, "control holds 3 instead of keys with values"),
        ({"emulate": 3}, "emulation.profile is 3: it must be text or null"),
    ],
)
def test_mistakes_with_old_keys(tmp_path: Path, content: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        read_recipe(written(tmp_path, content))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "words", [["--emulate", "quickstart"], ["--emulate=quickstart"], ["--emulation.profile", "quickstart"]]
)
def test_emulate_is_short_for_the_profile(words: list[str]) -> None:
    assert parse_recipe(make_parser("any", ""), words)[0].emulation.profile == "quickstart"


def test_a_short_form_without_a_value_or_misspelled() -> None:
    for words, sentence in (
        (["--emulate"], "--emulation.profile needs a value: text or null"),
        (["--emullate", "x"], r"no option --emullate \(did you mean --emulate\?\)"),
    ):
        with pytest.raises(UserError, match=sentence):
            parse_recipe(make_parser("any", ""), words)


def test_a_recipe_named_like_a_value_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = written(tmp_path, {"sync": {"quorum": 0.5}}).name
    config, _ = parse_recipe(make_parser("any", ""), ["--run.name", name, "--run.seed", "3", name])
    assert (config.run.name, config.run.seed, config.sync.quorum) == (name, 3, 0.5)


@pytest.mark.parametrize("option", ["--sync.delay", "--sync.delay_boun=3", "--emulation.prof"])
def test_options_are_written_out(option: str) -> None:
    with pytest.raises(UserError, match=rf"no option {option.partition('=')[0]} \(did you mean --(sync|emul)"):
        parse_recipe(make_parser("any", ""), [option, "3"] if "=" not in option else [option])


def test_an_empty_recipe_has_the_defaults() -> None:
    assert recipe_of({}) == Config()


def test_a_shipped_recipe_is_found_by_its_name_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parser = make_parser("hetsync-train", "Train.")
    config, _ = parse_recipe(parser, ["cifar10_resnet18", "--run.seed", "3"])
    assert config == parse_recipe(parser, [str(shipped_recipes()["cifar10_resnet18"]), "--run.seed", "3"])[0]
    assert (config.run.seed, config.data.name) == (3, "cifar10")


def test_what_is_a_path_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for word in ("digits.yaml", "recipes/digits", "./digits"):
        assert find_recipe(word) == Path(word)
    assert find_recipe("digits") == shipped_recipes()["digits"]
    (tmp_path / "digits").touch()
    assert find_recipe("digits") == Path("digits"), "a file of the user's comes first"


def test_a_name_that_no_recipe_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"there is no recipe digit \(did you mean digits\?\): give the path of a .yaml"
    ):
        find_recipe("digit")


def test_no_recipe_is_changed_by_another() -> None:
    """They have one parser and its defaults."""
    content = {"sync": {"pins": {0: 4}}, "model": {"options": {"width": 8}}}
    first = recipe_of(content)
    first.sync.pins[1] = 5
    first.model.options["depth"] = 2
    recipe_of({}).model.options["depth"] = 3
    assert (recipe_of({}).sync.pins, recipe_of({}).model.options) == ({}, {})
    assert (recipe_of(content).sync.pins, recipe_of(content).model.options) == ({0: 4}, {"width": 8})
