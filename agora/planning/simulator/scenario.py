"""What is simulated: machines, a model, churn and faults; read strictly from a TOML file."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agora_protocol.errors import InputError
from agora_protocol.ids import Span
from agora_protocol.limits import MAX_STAGES

from agora.net.shaping.link import LinkSpec
from agora.planning.simulator.churn import SHAPES, Churn


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
        """Raises for the first setting that no method has read, with the nearest known name."""
        for name in self._raw:
            if name not in self._asked:
                close = difflib.get_close_matches(name[:64], self._asked, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]!r}?" if close else f"its settings are {', '.join(self._asked)}"
                raise self._error(f"{self._where} has no setting {name[:64]!r}; {hint}")

    def table(self, name: str, optional: bool = False) -> SettingsTable:
        """Raises the error of this table's file for a missing table, unless `optional`: then it is an empty one."""
        value = self._value(name, {} if optional else None)
        if not isinstance(value, dict):
            raise self._error(f"{name} of {self._where} is not a table; write [{name}]")
        return SettingsTable(value, f"[{name}]", self._error)

    def tables(self, name: str) -> list[SettingsTable]:
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self._error(f"{name} of {self._where} is not a list of tables; write [[{name}]]")
        return [SettingsTable(entry, f"[[{name}]] number {n}", self._error) for n, entry in enumerate(value, 1)]

    def string(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._error(f"{name} of {self._where} is not a string; write it in quotes")
        if len(value) > 200:
            raise self._error(f"{name} of {self._where} is too long; write at most 200 characters")
        return value

    def choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        value = self.string(name, default)
        if value not in choices:
            close = difflib.get_close_matches(value, choices, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"write one of {', '.join(choices)}"
            raise self._error(f"{name} of {self._where} is {value!r}; {hint}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._error(f"{name} of {self._where} is neither true nor false")
        return value

    def integer(self, name: str, default: int | None = None, *, least: int, most: int) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._error(f"{name} of {self._where} is {value!r}; write a whole number from {least} to {most}")
        return value

    def number(
        self, name: str, default: float, *, least: float = 0.0, above: float | None = None, most: float = math.inf
    ) -> float:
        """above: if given, the number must be greater than this, and `least` has no effect."""
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
        """One number for all, or a list of `count`; limits as in `number`."""
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
            raise self._error(f"{self._where} lacks {name}; see docs/use/simulator.md for an example.")
        return value


MAX_PEERS: Final = 100_000
MAX_DURATION_S: Final = 7 * 86_400.0
DEFAULT_LINK: Final = "100Mbit,40ms"


class ScenarioError(InputError):
    """Raised for a scenario that cannot be simulated; its sentence says what is wrong and what to write instead."""

    code = "bad-scenario"


@dataclass(frozen=True, slots=True)
class MachineGroup:
    """`count` equal machines. speed: stages of work 1 a second. holds: most stages of one. span: held from the start;
    None: balanced_spans chooses.
    """

    kind: str
    count: int
    speed: float
    link: LinkSpec
    holds: int = 1
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """The run's costs. work: of each stage, for one microbatch: seconds on a machine of speed 1, forward and backward.

    forward_share: the forward's fraction of the work.
    boundary_bytes: sent to the next stage for one microbatch.
    gradient_bytes: sent back for it.
    state_bytes: what a newcomer to each stage fetches.
    slots: the slots of a machine: the maximum number of microbatches that it holds at the same time.
    target_microbatches: size of an optimizer step.
    max_in_flight: as in the manifest's schedule; 0: it is measured.
    staleness: as in the manifest's schedule; 0: no bound.
    """

    work: tuple[float, ...]
    boundary_bytes: float
    gradient_bytes: float
    state_bytes: tuple[float, ...]
    forward_share: float = 1.0 / 3.0
    slots: int = 128
    max_in_flight: int = 0
    staleness: float = 0.0
    target_microbatches: int = 0

    @property
    def stages(self) -> int:
        return len(self.work)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to simulate: the machines, the run's costs, the churn, and for how long.

    seconds: simulated time in all.
    warmup_s: the seconds at the start that the report's means leave out.
    sample_s: seconds between two samples.
    seed: of the random generator of all that is drawn.
    rebalancing: whether machines that serve may move.
    startup_s: seconds from a machine's start to its choice of a span.
    traffic: whether origins open microbatches; without microbatches, hours of churn are simulated in seconds, and the
        report shows placement only.
    """

    name: str
    machines: tuple[MachineGroup, ...]
    model: SimulatedModel
    churn: Churn = field(default_factory=Churn)
    seconds: float = 900.0
    warmup_s: float = 300.0
    sample_s: float = 10.0
    seed: int = 0
    rebalancing: bool = True
    startup_s: float = 5.0
    traffic: bool = True

    @property
    def peers(self) -> int:
        return sum(group.count for group in self.machines)


def load_scenario(path: Path) -> Scenario:
    """Without a name it gets the file's. Raises ScenarioError, and another InputError for a malformed link or span."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"{path} cannot be read ({error.strerror}); give the path of a scenario.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path} is not a TOML file ({error}); see docs/use/simulator.md for an example.") from None
    return parse_scenario(raw, path.stem)


def parse_scenario(raw: dict[str, Any], name: str = "scenario") -> Scenario:
    """Raises as load_scenario."""
    top = SettingsTable(raw, "the scenario", ScenarioError)
    model = _model(top.table("model"))
    groups = tuple(_machine_group(table, model.stages) for table in top.tables("machines"))
    scenario = Scenario(
        name=top.string("name", name),
        machines=groups,
        model=model,
        churn=_churn(top.table("churn", optional=True)),
        seconds=top.number("seconds", 900.0, above=0.0, most=MAX_DURATION_S),
        warmup_s=top.number("warmup_s", 300.0, least=0.0, most=MAX_DURATION_S),
        sample_s=top.number("sample_s", 10.0, least=0.1, most=3600.0),
        seed=top.integer("seed", 0, least=0, most=2**63 - 1),
        rebalancing=top.flag("rebalancing", True),
        startup_s=top.number("startup_s", 5.0, least=0.0, most=3600.0),
        traffic=top.flag("traffic", True),
    )
    top.end()
    if not scenario.peers:
        raise ScenarioError("The scenario has no peers; write a [[machines]] table with a count of at least 1.")
    if scenario.peers > MAX_PEERS:
        raise ScenarioError(f"{scenario.peers} peers are more than can be simulated; write at most {MAX_PEERS}.")
    if scenario.warmup_s >= scenario.seconds:
        raise ScenarioError(
            "The warmup_s is not less than seconds, so that nothing is measured; write a smaller warmup_s."
        )
    return scenario


def _model(table: SettingsTable) -> SimulatedModel:
    stages = table.integer("stages", least=1, most=MAX_STAGES)
    model = SimulatedModel(
        work=table.numbers("work", stages, 1.0, above=0.0, most=1e6),
        boundary_bytes=(boundary := table.number("boundary_bytes", 1e6, least=0.0, most=1e12)),
        gradient_bytes=table.number("gradient_bytes", boundary, least=0.0, most=1e12),
        state_bytes=table.numbers("state_bytes", stages, 100e6, least=0.0, most=1e13),
        forward_share=table.number("forward_share", 1.0 / 3.0, above=0.0, most=0.99),
        slots=table.integer("slots", 128, least=1, most=100_000),
        max_in_flight=table.integer("max_in_flight", 0, least=0, most=100_000),
        staleness=table.number("staleness", 0.0, least=0.0, most=1000.0),
        target_microbatches=table.integer("target_microbatches", 0, least=0, most=10**9),
    )
    table.end()
    return model


def _machine_group(table: SettingsTable, stages: int) -> MachineGroup:
    span = table.string("stages", "")
    link = table.string("link", DEFAULT_LINK)
    group = MachineGroup(
        kind=table.string("kind", "machine"),
        count=table.integer("count", 1, least=0, most=MAX_PEERS),
        speed=table.number("speed", 1.0, above=0.0, most=1e9),
        link=LinkSpec.parse(link),
        holds=table.integer("holds", 1, least=1, most=MAX_STAGES),
        span=Span.parse(span) if span else None,
    )
    table.end()
    if group.span is not None and group.span.last >= stages:
        raise ScenarioError(f"Stages {group.span} of {group.kind!r} are not all there; the last one is {stages - 1}.")
    return group


def _churn(table: SettingsTable) -> Churn:
    shape = table.choice("shape", "none", tuple(SHAPES))
    base = SHAPES[shape]
    churn = Churn(
        kills=table.number("kills_per_hour", base.kills, least=0.0, most=1000.0),
        leaves=table.number("leaves_per_hour", base.leaves, least=0.0, most=1000.0),
        hangs=table.number("hangs_per_hour", base.hangs, least=0.0, most=1000.0),
        at_once=table.integer("at_once", base.at_once, least=1, most=MAX_PEERS),
        return_s=table.number("return_s", base.return_s, above=0.0, most=MAX_DURATION_S),
    )
    table.end()
    return churn
