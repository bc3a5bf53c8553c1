"""Reads the machines of a plan from the text of a peers.toml. Pure.

A file has one table [[machine]] for each machine or kind of machine, and may say `precision`: "bf16" (the default, as
on GPUs) or "float32" (as on CPUs). Source of the accelerators' speeds: layer times that the planner Zorse (arXiv
2507.10392) ships for Llama 7B to 33B, forward and backward in 16 bits. Knows: TOML, keys, units. Must not know: files,
models, plans.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from agora_protocol.errors import InputError
from agora_protocol.fields import describe
from agora_protocol.manifest_rules import suggest

from agora.plan.machine import Machine

MAX_FILE_BYTES: Final = 1 << 20
MAX_MACHINES: Final = 2048
USABLE_MEMORY: Final = 0.9
"""The part of a device's memory that stages may take; the rest is for the device's context and for fragmentation."""
BYTES_PER_MBIT: Final = 1e6 / 8
PRECISIONS: Final = ("bf16", "float32")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A kind of accelerator. tflops: 10^12 operations per second, reached on decoder layers. memory_gb: 10^9 bytes."""

    tflops: float
    memory_gb: float


ACCELERATORS: Final[dict[str, Accelerator]] = {
    "h100": Accelerator(300, 80),
    "a100": Accelerator(205, 80),
    "a100-40": Accelerator(195, 40),
    "a6000": Accelerator(84, 48),
    "v100": Accelerator(78, 16),
    "a10g": Accelerator(57, 24),
    "l4": Accelerator(41, 24),
    "t4": Accelerator(26, 16),
    "p100": Accelerator(7.5, 16),
    "p40": Accelerator(6.5, 24),
}


@dataclass(frozen=True, slots=True)
class NumberKey:
    """The bounds, both included, of a key whose value is a number. what: the value in words, with its unit."""

    what: str
    least: float
    most: float


NUMBER_KEYS: Final[dict[str, NumberKey]] = {
    "flops_tflops": NumberKey("10^12 operations per second", 1e-4, 1e5),
    "memory_gb": NumberKey("GB of memory", 0.01, 1e5),
    "host_memory_gb": NumberKey("GB of host memory", 0, 1e6),
    "upload_mbps": NumberKey("upload in Mbit/s", 0.01, 1e7),
    "download_mbps": NumberKey("download in Mbit/s", 0.01, 1e7),
    "latency_ms": NumberKey("milliseconds to any other machine", 0, 10_000),
    "count": NumberKey("number of such machines", 1, MAX_MACHINES),
}
MACHINE_KEYS: Final = ("name", "kind", *NUMBER_KEYS)


@dataclass(frozen=True, slots=True)
class PeersFile:
    """The machines that a peers.toml names; immutable.

    kinds: one machine for each table of the file, with the table's name. machines: all of them, a table's `count`
    machines with numbered names. in_bf16: whether they compute products in bf16.
    """

    machines: tuple[Machine, ...]
    kinds: tuple[Machine, ...]
    in_bf16: bool

    def find_kind(self, name: str) -> Machine:
        """Returns the file's kind of machine with this name or, if it has none, a machine with the accelerator `name`.

        The latter gets the link of the file's machine of median upload. Raises InputError for an unknown name.
        """
        known = {kind.name: kind for kind in self.kinds}
        if name in known:
            return known[name]
        if name not in ACCELERATORS:
            raise InputError(f"--add {describe(name)} is not a kind of machine; {suggest(name, known | ACCELERATORS)}")
        links = sorted(self.machines, key=lambda machine: machine.upload)
        middle, accelerator = links[len(links) // 2], ACCELERATORS[name]
        return replace(
            middle,
            name=name,
            flops=accelerator.tflops * 1e12,
            memory=USABLE_MEMORY * accelerator.memory_gb * 1e9,
            host_memory=0.0,
        )


def read_peers(text: str, source: str) -> PeersFile:
    """Returns the machines that `text`, the content of a peers file, names.

    Raises InputError for anything that is wrong in it; the sentence begins with `source`.
    """
    if len(text) > MAX_FILE_BYTES:
        raise InputError(f"{source}: the file has more than {MAX_FILE_BYTES} characters; is it a list of machines?")
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: this is not valid TOML ({str(error)[:200]}); correct that line.") from None
    for key in values:
        if key not in ("machine", "precision"):
            raise InputError(f"{source}: there is no key {describe(key)}; {suggest(key, ('machine', 'precision'))}")
    precision = values.get("precision", "bf16")
    if precision not in PRECISIONS:
        raise InputError(f'{source}: precision is {describe(precision)}; use "bf16" or "float32".')
    tables = values.get("machine", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables) or not tables:
        raise InputError(f"{source}: there is no machine in it; add a [[machine]] table with kind and upload_mbps.")
    kinds = [_kind(table, f"{source}: machine {number}") for number, table in enumerate(tables, 1)]
    return PeersFile(_machines(kinds, tables, source), tuple(kinds), precision == "bf16")


def _machines(kinds: list[Machine], tables: list[dict[str, Any]], source: str) -> tuple[Machine, ...]:
    """Returns all machines; those of a table with `count` get numbered names.

    Raises InputError for more than MAX_MACHINES, and for two of the same name.
    """
    machines: list[Machine] = []
    for kind, table in zip(kinds, tables, strict=True):
        count = table.get("count", 1)
        names = [kind.name] if count == 1 else [f"{kind.name}-{number}" for number in range(1, count + 1)]
        machines += [replace(kind, name=name) for name in names]
        if len(machines) > MAX_MACHINES:
            raise InputError(f"{source}: more than {MAX_MACHINES} machines cannot be planned; plan a part of them.")
    seen: set[str] = set()
    for machine in machines:
        if machine.name in seen:
            raise InputError(f"{source}: two machines are called {describe(machine.name)}; give each its own name.")
        seen.add(machine.name)
    return tuple(machines)


def _kind(table: Mapping[str, Any], where: str) -> Machine:
    """Returns the machine that a [[machine]] table describes.

    Raises InputError for an unknown key, a malformed value, or if compute, memory or upload is missing. where: begins
    its sentence.
    """
    for key in table:
        if key not in MACHINE_KEYS:
            raise InputError(f"{where} has no key {describe(key)}; {suggest(key, MACHINE_KEYS)}")
    numbers = {key: _number(key, table[key], where) for key in NUMBER_KEYS if key in table}
    name, accelerator = _name(table, where), _accelerator(table, where)
    flops = numbers.get("flops_tflops", accelerator.tflops if accelerator else 0.0)
    memory = numbers.get("memory_gb", accelerator.memory_gb if accelerator else 0.0)
    if not flops or not memory:
        lacking = "flops_tflops" if not flops else "memory_gb"
        raise InputError(f"{where} says neither kind nor {lacking}; give one of {', '.join(ACCELERATORS)} as kind.")
    if "upload_mbps" not in numbers:
        raise InputError(f"{where} does not say upload_mbps; measure its upload in Mbit/s.")
    upload = numbers["upload_mbps"]
    return Machine(
        name=name,
        flops=flops * 1e12,
        memory=USABLE_MEMORY * memory * 1e9,
        host_memory=USABLE_MEMORY * numbers.get("host_memory_gb", 0.0) * 1e9,
        upload=upload * BYTES_PER_MBIT,
        download=numbers.get("download_mbps", upload) * BYTES_PER_MBIT,
        latency_s=numbers.get("latency_ms", 0.0) / 1000,
    )


def _name(table: Mapping[str, Any], where: str) -> str:
    """Returns the name of a table's machine: its `name`, by default its `kind`. Raises InputError for a bad one."""
    name = table.get("name", table.get("kind", ""))
    if not isinstance(name, str) or not 0 < len(name) <= 64 or not name.isprintable():
        raise InputError(f"{where} has the name {describe(name)}; give it 1 to 64 printable characters.")
    return name


def _accelerator(table: Mapping[str, Any], where: str) -> Accelerator | None:
    """Returns the accelerator that the table's `kind` names; None without that key. Raises InputError if unknown."""
    if "kind" not in table:
        return None
    kind = table["kind"]
    if not isinstance(kind, str) or kind not in ACCELERATORS:
        raise InputError(f"{where} has the unknown kind {describe(kind)}; {suggest(str(kind), ACCELERATORS)}")
    return ACCELERATORS[kind]


def _number(key: str, value: object, where: str) -> float:
    """Returns `value`, which must be a number within the bounds of `key`; raises InputError if it is not."""
    bounds = NUMBER_KEYS[key]
    is_number = isinstance(value, int if key == "count" else int | float) and not isinstance(value, bool)
    if not isinstance(value, int | float) or not is_number or not math.isfinite(value):
        raise InputError(f"{where} has {key} {describe(value)}, which is no {bounds.what}; give a number.")
    if not bounds.least <= value <= bounds.most:
        raise InputError(
            f"{where} has {key} {value:g}; give its {bounds.what}, {bounds.least:g} to {bounds.most:g}, or leave the "
            "machine out."
        )
    return float(value)
