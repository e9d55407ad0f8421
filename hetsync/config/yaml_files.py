"""YAML that users write (recipes, cluster profiles, scripts), read within limits that no honest file meets.

A few lines of YAML can stand for more values than memory holds; of a key that is there twice all but the last are lost.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hetsync.errors import UserError, brief

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # Python 3.11

LARGEST_BYTES = 2**20
MOST_VALUES = 40_000  # keys count, too, and an alias as all that it stands for
DEEPEST = 40
LONGEST_NUMBER = 40  # characters

INT, FLOAT, TIMESTAMP = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))
# YAML 1.1 has 1:30 for 90, too. 089 stays text, which PyYAML writes without quotes.
INT_PATTERN = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$")
# As YAML 1.2 has it: YAML 1.1 takes 1e-3 for text.
FLOAT_PATTERN = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?)$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)


def read_yaml(file: Path | Traversable, what: str) -> Any:
    """What the file holds. UserError, which names it by `what`, where it cannot be read or goes beyond the limits."""
    try:
        with file.open("rb") as opened:
            content = opened.read(LARGEST_BYTES + 1)
        if len(content) > LARGEST_BYTES:
            raise UserError(f"cannot read {what}: it has more than {LARGEST_BYTES:,} bytes; give a smaller file")
        return load_yaml(content.decode())
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ValueError: no text, or no name of a file
        raise UserError(f"cannot read {what}: {error}; it must be a YAML file") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        starred = getattr(error, "context", None) == "while scanning an alias"
        remedy = "; what begins with * needs quotes: '*'" if starred else ""
        raise UserError(f"cannot read {what}: {line}{getattr(error, 'problem', None) or error}{remedy}") from error


def load_yaml(text: str) -> Any:
    """What the text stands for. yaml.YAMLError where it is broken or goes beyond the limits."""
    return yaml.load(text, LimitedLoader)


class LimitedLoader(yaml.SafeLoader):
    """Safe, with limits, with YAML 1.2's numbers, and without tags and dates."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own way)
        first: [(tag, pattern) for tag, pattern in known if tag not in (INT, FLOAT, TIMESTAMP)]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0
        self._values_of: dict[yaml.Node, int] = {}  # nodes that are complete

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event, before = self.peek_event(), self._values
        if getattr(event, "tag", None):
            raise _refusal(f"{event.tag} is a tag, and none is taken here: write the value alone", event.start_mark)
        if self._depth > DEEPEST:
            raise _refusal(f"more than {DEEPEST} levels of values in values: remove some", event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if node not in self._values_of:
                raise _refusal(f"*{event.anchor} is part of what it stands for: write it out", event.start_mark)
            self._values += self._values_of[node]
        elif node is not None:
            self._values += 1
            self._values_of[node] = self._values - before
        if self._values > MOST_VALUES:
            raise _refusal(f"more than {MOST_VALUES:,} keys and values, aliases written out", event.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _refusal(f"key {brief(key.value)} is there twice: remove one", key.start_mark)
                seen.add(key.value)
        return node

    def construct_whole(self, node: yaml.ScalarNode) -> int:
        return int(_number(_whole, node))

    def construct_real(self, node: yaml.ScalarNode) -> float:
        """1e4 is a whole number: it is how people write 10000."""
        value = float(_number(self.construct_yaml_float, node))
        return int(value) if "e" in node.value.lower() and value.is_integer() and abs(value) < 2**53 else value


LimitedLoader.add_implicit_resolver(INT, INT_PATTERN, list("-+0123456789"))
LimitedLoader.add_implicit_resolver(FLOAT, FLOAT_PATTERN, list("-+0123456789."))
LimitedLoader.add_constructor(FLOAT, LimitedLoader.construct_real)
LimitedLoader.add_constructor(INT, LimitedLoader.construct_whole)


def _whole(node: yaml.ScalarNode) -> int:
    """010 is ten, as YAML 1.2 and the command line have it: YAML 1.1 takes it for eight."""
    digits = node.value.replace("_", "")
    return int(digits, 10 if digits.lstrip("-+").isdecimal() else 0)


def _number(construct: Callable[[yaml.ScalarNode], Any], node: yaml.ScalarNode) -> Any:
    if len(node.value) <= LONGEST_NUMBER:
        with contextlib.suppress(ValueError):
            return construct(node)
    raise _refusal(f"{brief(node.value)} is no number that can be read", node.start_mark)


def _refusal(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
