"""What every event of a daemon is: a frozen dataclass with a level and a sentence; events.py lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, dataclass_transform

Level = Literal["debug", "info", "warning", "error"]


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Event:
    """Base class of everything that a daemon reports. events.py has all subclasses; each becomes a frozen dataclass.

    level: the severity, by which logs choose what they show. template: see `describe`.
    """

    level: ClassVar[Level] = "debug"
    template: ClassVar[str] = ""  # a sentence with the fields' names in braces; "" lists all fields

    def __init_subclass__(cls, level: Level = "debug", template: str = "") -> None:
        cls.level, cls.template = level, template
        dataclass(frozen=True)(cls)

    def describe(self) -> str:
        """Returns a sentence for a person: the filled template, without " " and ";" at its end.

        Without a template, the class's name and all fields. Values are not escaped.
        """
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.template:
            return self.template.format(**values).rstrip(" ;")
        return f"{type(self).__name__}: " + ", ".join(f"{name} {value}" for name, value in values.items())


Report = Callable[[Event], None]  # takes an event from any module and any thread. It never blocks and never raises.
