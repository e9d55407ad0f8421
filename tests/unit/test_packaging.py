"""What setup.cfg ships: a package or a file that it forgets is missed only by those who install a wheel."""

from __future__ import annotations

import ast
import configparser
from pathlib import Path

import pytest
import yaml

from hetsync.version import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    read = configparser.ConfigParser()
    read.read(ROOT / "setup.cfg", encoding="utf-8")
    return read


def listed(setup: configparser.ConfigParser) -> dict[str, Path]:
    """Each package with its folder."""
    elsewhere = dict(line.split(" = ") for line in setup["options"]["package_dir"].split("\n") if line)
    names = setup["options"]["packages"].split()
    return {name: ROOT / elsewhere.get(name, name.replace(".", "/")) for name in names}


def test_every_package_is_listed(setup: configparser.ConfigParser) -> None:
    there = {
        path.parent for top in ("hetsync", "models", "cluster_profiles") for path in (ROOT / top).rglob("__init__.py")
    }
    assert set(listed(setup).values()) == there


def test_every_file_beside_code_is_shipped_but_readmes(setup: configparser.ConfigParser) -> None:
    data = setup["options.package_data"]
    shipped = {
        path
        for package, folder in listed(setup).items()
        for pattern in data.get(package, "").replace(",", " ").split()
        for path in folder.glob(pattern)
    }
    there = {
        path
        for top in ("hetsync", "models", "cluster_profiles")
        for path in (ROOT / top).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".md")
    }
    assert shipped == there
    assert len(shipped) > 20


# What the standard library has had since Python 3.11 or later, of what this code might take.
NEWER = {
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"StrEnum", "ReprEnum", "member", "nonmember", "verify"},
    "hashlib": {"file_digest"},
    "itertools": {"batched"},
    "typing": {"LiteralString", "Never", "NotRequired", "Required", "Self", "Unpack", "assert_never", "override"},
}


def test_the_oldest_python_has_what_is_imported(setup: configparser.ConfigParser) -> None:
    assert setup["options"]["python_requires"] == ">=3.10"
    for path in [path for top in ("hetsync", "models") for path in (ROOT / top).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in NEWER:
                newer = NEWER[node.module] & {alias.name for alias in node.names}
                assert not newer, f"{path.relative_to(ROOT)} takes {newer} of {node.module}"


def test_one_version_everywhere(setup: configparser.ConfigParser) -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert setup["metadata"]["version"] == cited["version"] == __version__
    assert f'image.version="{__version__}"' in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert f"## {__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
