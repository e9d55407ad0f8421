"""From words and files to a recipe. jsonargparse merges and checks types; mistakes are UserErrors of one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args

import jsonargparse
import yaml

from hetsync.config.checks import expected
from hetsync.config.explain import explain
from hetsync.config.recipe_file import find_recipe, read_content, settings
from hetsync.config.schema import Config
from hetsync.config.yaml_files import LONGEST_NUMBER, load_yaml
from hetsync.errors import UserError, brief
from hetsync.launchers import first_rank
from hetsync.version import __version__

SHORT_FORMS = {"--emulate": "--emulation.profile", "--plan": "--plan.file"}

jsonargparse.set_loader("hetsync", load_yaml, (yaml.YAMLError,))


class RecipeParser(jsonargparse.ArgumentParser):
    """Takes the keys of a recipe. Helps on rank 0 only: every rank parses the same words."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(explain(message, [*SHORT_FORMS, *self._option_string_actions]))

    def print_help(self, *args: Any, **kwargs: Any) -> None:
        if first_rank():
            super().print_help(*args, **kwargs)

    def dump(self, namespace: jsonargparse.Namespace, *args: Any, **kwargs: Any) -> str:
        """For --print_config: the recipe, without what else a command line takes."""
        others = [name for name in namespace.as_dict() if name not in Config.__dataclass_fields__]
        recipe = namespace.clone()
        for name in others:
            recipe.pop(name)
        return super().dump(recipe, *args, **kwargs) if first_rank() else ""


def make_parser(program: str, description: str) -> RecipeParser:
    """Of a command that takes a recipe and its keys; add what else it takes."""
    parser = _bare_parser(program, description, f"{program} [RECIPE] [--section.key VALUE ...]")
    parser.add_argument(
        "recipe",
        nargs="?",
        help="Recipe to start from, a file or the name of one that comes along; the keys below override it.",
    )
    return _with_keys(parser)


def make_run_parser(program: str, description: str) -> RecipeParser:
    """The same of a command that takes `run_folders`, whose recipes the keys override."""
    parser = _bare_parser(program, description, f"{program} RUN [RUN ...] [--section.key VALUE ...]")
    parser.add_argument(
        "run_folders", metavar="RUN", nargs="*", default=[], help="Run folders; the keys below override their recipes."
    )
    return _with_keys(parser)


def _bare_parser(program: str, description: str, usage: str) -> RecipeParser:
    parser = RecipeParser(
        prog=program, description=description, version=__version__, parser_mode="hetsync", allow_abbrev=False
    )
    parser.usage = usage
    return parser


def _with_keys(parser: RecipeParser) -> RecipeParser:
    parser.add_argument("--config", action="config", help=jsonargparse.SUPPRESS)  # brings --print_config
    parser.add_class_arguments(Config, as_group=True)
    return parser


def parse_recipe(
    parser: RecipeParser, argv: Sequence[str], kept: Path | None = None
) -> tuple[Config, jsonargparse.Namespace]:
    """The effective recipe, and whatever else the parser takes. Raises UserError; exits for --help and the like.

    The keys on the command line override the recipe named there, which overrides the one `kept` in a run's folder.
    """
    words = plain_words(argv)
    recipes = [kept] if kept is not None else []
    if (named := look_ahead(parser, argv).get("recipe")) is not None:
        recipes.append(find_recipe(named))
    parsed = parser.parse_args(words, namespace=_merged(parser, parser.get_defaults(), map(read_content, recipes)))
    return _config_of(parser, parsed), parsed


def look_ahead(parser: RecipeParser, argv: Sequence[str]) -> jsonargparse.Namespace:
    """What the words say without their recipe; --print_config would print that."""
    return parser.parse_args(plain_words(word for word in argv if not word.startswith("--print_config")))


def read_recipe(path: Path) -> Config:
    """The recipe in a file, with defaults for what it leaves out. UserError where it cannot be."""
    return recipe_of(read_content(path))


def recipe_of(content: Mapping[str, Any]) -> Config:
    """The recipe with these sections, with defaults for what they leave out. UserError where it cannot be."""
    parser, defaults = _parser_and_defaults()
    return _config_of(parser, _merged(parser, defaults, [content]))


@cache
def _parser_and_defaults() -> tuple[RecipeParser, jsonargparse.Namespace]:
    """To make them takes a tenth of a second, which is most of what `hetsync.join` takes."""
    parser = make_parser("", "")
    return parser, parser.get_defaults()


def plain_words(words: Iterable[str]) -> list[str]:
    """The words of a command line: short forms as what they stand for, 1e4 as 10000 where a whole number is due."""
    kinds = {f"--{key}": kind for key, kind in settings()}
    out: list[str] = []
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            option = SHORT_FORMS.get(option, option)
            out.append(option + equals + _plain_value(option, kinds.get(option), value))
        else:
            option = out[-1] if out else ""
            out.append(_plain_value(option, kinds.get(option), word))
    return out


def _plain_value(option: str, kind: Any, text: str) -> str:
    if not {int, float} & {kind, *get_args(kind)}:
        return text
    if re.fullmatch(rf"[-+]?\d{{{LONGEST_NUMBER + 1},}}", text):
        key = option.removeprefix("--")
        raise UserError(f"{key} is {brief(text)}: it must be {expected(kind)}, of at most {LONGEST_NUMBER} digits")
    whole = int in (kind, *get_args(kind)) and re.fullmatch(r"\d+(\.\d*)?[eE]\+?\d{1,2}", text)
    return str(int(float(text))) if whole and float(text).is_integer() else text


def _merged(
    parser: RecipeParser, defaults: jsonargparse.Namespace, contents: Iterable[Mapping[str, Any]]
) -> jsonargparse.Namespace:
    """Defaults, overridden by each content in turn."""
    merged = defaults.clone()
    for content in contents:
        merged.update(parser.parse_object(dict(content), defaults=False))
    return merged


def _config_of(parser: RecipeParser, parsed: jsonargparse.Namespace) -> Config:
    for key, kind in settings():
        # jsonargparse takes null for "not given".
        if parsed[key] is None and kind is not Any and NoneType not in get_args(kind):
            raise UserError(f"{key} is null: it must be {expected(kind)}; leave it out for the default")
    made = parser.instantiate(parsed)
    return Config(**{name: made[name] for name in Config.__dataclass_fields__})
