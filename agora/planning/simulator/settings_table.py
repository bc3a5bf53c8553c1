"""One table of a TOML file, read strictly: each setting has a type and limits, and an unknown one is an error."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any

from agora_protocol.errors import InputError


class SettingsTable:
    """One table of a TOML file, whose settings are read by name and type; `end` raises if a setting was not read.

    Each method raises `error(sentence)` for a value of a wrong type or outside of its limits. A missing setting has the
    value `default`; if `default` is None, the method raises. where: the table's name in error sentences.
    """

    def __init__(self, raw: dict[str, Any], where: str, error: Callable[[str], InputError]) -> None:
        self._raw = raw
        self._where = where
        self._error = error
        self._asked: list[str] = []

    def end(self) -> None:
        """Raises for the first setting that no method has read; to be called after all known settings have been read.

        The message names the known setting with the most similar name; if none is similar, all known settings.
        """
        for name in self._raw:
            if name not in self._asked:
                close = difflib.get_close_matches(name[:64], self._asked, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]!r}?" if close else f"its settings are {', '.join(self._asked)}"
                raise self._error(f"{self._where} has no setting {name[:64]!r}; {hint}")

    def table(self, name: str, optional: bool = False) -> SettingsTable:
        """Returns the table [name] inside this one. A missing table counts as empty if `optional`, otherwise raises."""
        value = self._value(name, {} if optional else None)
        if not isinstance(value, dict):
            raise self._error(f"{name} of {self._where} is not a table; write [{name}]")
        return SettingsTable(value, f"[{name}]", self._error)

    def tables(self, name: str) -> list[SettingsTable]:
        """Returns the list of tables [[name]]; [] if there is none. Raises if [name] is something else."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self._error(f"{name} of {self._where} is not a list of tables; write [[{name}]]")
        return [SettingsTable(entry, f"[[{name}]] number {n}", self._error) for n, entry in enumerate(value, 1)]

    def string(self, name: str, default: str) -> str:
        """Returns the setting `name`; raises unless it is a string of at most 200 characters."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._error(f"{name} of {self._where} is not a string; write it in quotes")
        if len(value) > 200:
            raise self._error(f"{name} of {self._where} is too long; write at most 200 characters")
        return value

    def choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        """Returns the setting `name`; raises unless it is one of `choices`."""
        value = self.string(name, default)
        if value not in choices:
            close = difflib.get_close_matches(value, choices, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"write one of {', '.join(choices)}"
            raise self._error(f"{name} of {self._where} is {value!r}; {hint}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Returns the setting `name`; raises unless it is true or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._error(f"{name} of {self._where} is neither true nor false")
        return value

    def integer(self, name: str, default: int | None = None, *, least: int, most: int) -> int:
        """Returns the setting `name`, a whole number from `least` to `most`.

        default: the value of a missing setting; None: a missing setting raises. Raises for any other value.
        """
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._error(f"{name} of {self._where} is {value!r}; write a whole number from {least} to {most}")
        return value

    def number(
        self, name: str, default: float, *, least: float = 0.0, above: float | None = None, most: float = math.inf
    ) -> float:
        """Returns the setting `name`; raises unless it is a number from `least` to `most`.

        above: if given, the number must be greater than this, and `least` has no effect.
        """
        return self._check_limits(name, self._value(name, default), least, above, most)

    def numbers(
        self,
        name: str,
        count: int,
        default: float,
        *,
        least: float = 0.0,
        above: float | None = None,
        most: float = math.inf,
    ) -> tuple[float, ...]:
        """Returns the setting `name` as `count` numbers; the file has one number for all, or a list of `count`.

        default: one number for all. least, most: limits of each number, both included. above: if given, each number
        must be greater, and `least` has no effect. Raises for a list of another length, and for a number outside of the
        limits.
        """
        value = self._value(name, default)
        values = value if isinstance(value, list) else [value] * count
        if len(values) != count:
            raise self._error(f"{name} of {self._where} has {len(values)} numbers; write {count}, or one for all")
        return tuple(self._check_limits(name, entry, least, above, most) for entry in values)

    def _check_limits(self, name: str, value: Any, least: float, above: float | None, most: float) -> float:
        low = least if above is None else above
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= most or (above is not None and value == above):
            word = "from" if above is None else "above"
            raise self._error(f"{name} of {self._where} is {value!r}; write a number {word} {low:g}, at most {most:g}")
        return float(value)

    def _value(self, name: str, default: Any) -> Any:
        self._asked.append(name)
        value = self._raw.get(name, default)
        if value is None:
            raise self._error(f"{self._where} lacks {name}; see docs/use/simulator.md for an example")
        return value
