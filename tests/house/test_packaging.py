"""The package says of itself what is so: what it imports is declared and pinned, its version stands in one place."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = [*sorted((ROOT / "agora").rglob("*.py")), *sorted((ROOT / "protocol" / "agora_protocol").rglob("*.py"))]
DISTRIBUTIONS = {
    "google": "protobuf",
    "mlflow": "mlflow-skinny",
}  # the name to install, where it differs from the name to import
OWN = {"agora", "agora_protocol"}


def imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.split(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.split(".")[0]
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(function).endswith("import_module"):
                    yield name.split(".")[0]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names_of(requirements: list[str]) -> set[str]:
    return {normal(re.match(r"[\w.-]+", text).group()) for text in requirements}


def test_every_package_that_is_imported_is_declared() -> None:
    imported = {name for path in PACKAGES for name in imported_by(path)} - sys.stdlib_module_names - OWN
    extras = PROJECT["optional-dependencies"]
    for_users = (requirement for name, extra in extras.items() if name != "dev" for requirement in extra)
    declared = names_of([*PROJECT["dependencies"], *for_users])
    assert {normal(DISTRIBUTIONS.get(name, name)) for name in imported} <= declared


def test_every_declared_package_is_pinned_in_the_tested_set() -> None:
    lines = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = names_of([line for line in lines if "==" in line])
    declared = names_of(
        [*PROJECT["dependencies"], *(name for extra in PROJECT["optional-dependencies"].values() for name in extra)]
    )
    assert declared - {normal(PROJECT["name"])} <= pinned


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    places = [
        path.relative_to(ROOT).as_posix()
        for path in PACKAGES
        if re.search(r"^__version__\s*=", path.read_text(encoding="utf-8"), re.M)
    ]
    assert places == ["agora/__init__.py"]


def test_the_license_is_the_declared_one() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0" in text and "END OF TERMS AND CONDITIONS" in text


def test_the_change_log_has_the_changes_to_come() -> None:
    assert re.search(r"^## \[?Unreleased\]?$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
