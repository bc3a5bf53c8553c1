"""Reads the machines of a plan from the text of a peers.toml. Pure.

A file has one table [[machine]] for each machine or kind of machine, and may have `precision`: "bf16" (the default, as
on GPUs) or "float32" (as on CPUs). Source of the accelerators' speeds: layer times that the planner Zorse (arXiv
2507.10392) ships for Llama 7B to 33B, forward and backward; where an accelerator has a remark, data sheets.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from agora_protocol.errors import InputError
from agora_protocol.fields import describe
from agora_protocol.manifest_errors import suggest

from agora.cost.run_cost import Machine

MAX_FILE_CHARACTERS: Final = 1 << 20
MAX_MACHINES: Final = 2048
# The part of a device's memory that stages may take; the rest is for the device's context and for fragmentation.
USABLE_MEMORY: Final = 0.9
BYTES_PER_MBIT: Final = 1e6 / 8
PRECISIONS: Final = ("bf16", "float32")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A kind of accelerator."""

    tflops: float  # TFLOP/s on decoder layers, in the precision in which daemons compute there
    memory_gb: float  # in 10^9 bytes
    remark: str = ""  # how the speed is known, if it was not measured in that precision


COMPUTED: Final = "computed from its data sheet, not measured"
IN_FP16: Final = "measured by others; daemons compute in fp16 there, which was never run on one"
IN_FP16_COMPUTED: Final = "computed from its data sheet, not measured; daemons compute in fp16 there"
# Daemons use bf16, or fp16 on Volta and Turing; older cards have tensor cores for neither.
IN_FLOAT32: Final = "daemons compute in float32 there; that speed is " + COMPUTED
# What part of the data sheet's peak, dense and summed in float32, such cards reach: in bf16 as the A6000 (84 of 155)
# and, with faster memory, as the H100 (300 of 989); in float32 as the P40 (6.5 of 11.8).
PART_OF_BF16: Final = 0.54
PART_OF_BF16_HBM: Final = 0.30
PART_OF_FLOAT32: Final = 0.55


def _in_bf16(peak: float, memory_gb: float, part: float = PART_OF_BF16) -> Accelerator:
    return Accelerator(round(part * peak, 1), memory_gb, COMPUTED)


def _in_float32(peak: float, memory_gb: float) -> Accelerator:
    return Accelerator(round(PART_OF_FLOAT32 * peak, 1), memory_gb, IN_FLOAT32)


ACCELERATORS: Final[dict[str, Accelerator]] = {
    "h200": Accelerator(300, 141, "taken from the H100, whose processors it has"),
    "h100": Accelerator(300, 80),
    "mi300x": _in_bf16(1307, 192, PART_OF_BF16_HBM),
    "a100": Accelerator(205, 80),
    "a100-40": Accelerator(195, 40),
    "l40s": _in_bf16(362, 48),
    "a6000": Accelerator(84, 48),
    "a40": _in_bf16(149.7, 48),
    "a10g": Accelerator(57, 24),
    "l4": Accelerator(41, 24),
    "rtx5090": _in_bf16(209.5, 32),
    "rtx5080": _in_bf16(112.6, 16),
    "rtx4090": _in_bf16(165.2, 24),
    "rtx4080": _in_bf16(97.5, 16),
    "rtx4070": _in_bf16(58.3, 12),
    "rtx4060ti": _in_bf16(44.1, 16),
    "rtx3090": _in_bf16(71.2, 24),
    "rtx3080": _in_bf16(59.5, 10),
    "rtx3060": _in_bf16(25.5, 12),
    "v100": Accelerator(78, 16, IN_FP16),
    "t4": Accelerator(26, 16, IN_FP16),
    "rtx2080ti": Accelerator(round(PART_OF_BF16 * 53.8, 1), 11, IN_FP16_COMPUTED),
    "p100": _in_float32(9.5, 16),
    "p40": Accelerator(6.5, 24),
}


@dataclass(frozen=True, slots=True)
class NumberKey:
    """A key of a [[machine]] table whose value is a number: its bounds, both included."""

    what: str  # the value in words, with its unit
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
    """What a peers.toml says: its machines, one machine for each of its tables, and the precision; immutable."""

    machines: tuple[Machine, ...]  # all; those of a table whose `count` is above 1 have numbered names
    kinds: tuple[Machine, ...]  # a machine for each table of the file, with the table's name
    in_16_bits: bool  # whether the machines compute products in bf16
    remarks: tuple[str, ...] = ()  # sentences about speeds that nobody has measured

    def find_kind(self, name: str) -> Machine:
        """A kind of the file, else the accelerator `name` with USABLE_MEMORY and the links of the file's machine of
        median upload. Raises InputError.
        """
        known = {kind.name: kind for kind in self.kinds}
        if name in known:
            return known[name]
        if name not in ACCELERATORS:
            raise InputError(f"--add {describe(name)} is not a kind of machine; {suggest(name, known | ACCELERATORS)}")
        links = sorted(self.machines, key=lambda machine: machine.upload)
        accelerator = ACCELERATORS[name]
        return replace(
            links[len(links) // 2],
            name=name,
            flops=accelerator.tflops * 1e12,
            memory=USABLE_MEMORY * accelerator.memory_gb * 1e9,
            host_memory=0.0,
        )


def read_peers(text: str, source: str) -> PeersFile:
    """source: the file's name for errors. Raises InputError for a text that is too long or malformed, unknown keys, bad
    values, no or too many machines, equal names.
    """
    if len(text) > MAX_FILE_CHARACTERS:
        raise InputError(f"{source}: more than {MAX_FILE_CHARACTERS} characters are in it; is it a list of machines?")
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
    kinds = [_read_machine(table, f"{source}: machine {number}") for number, table in enumerate(tables, 1)]
    remarks = dict.fromkeys(remark for table in tables if (remark := _remark_on(table)))
    return PeersFile(_expand_counts(kinds, tables, source), tuple(kinds), precision == "bf16", tuple(remarks))


def _remark_on(table: Mapping[str, Any]) -> str:
    if "kind" not in table or "flops_tflops" in table:
        return ""
    accelerator = ACCELERATORS[table["kind"]]
    speed = f"{accelerator.tflops:g} TFLOP/s of {table['kind']}: {accelerator.remark}"
    return f"{speed}; give flops_tflops if you have measured it" if accelerator.remark else ""


def _expand_counts(kinds: list[Machine], tables: list[dict[str, Any]], source: str) -> tuple[Machine, ...]:
    machines: list[Machine] = []
    for kind, table in zip(kinds, tables, strict=True):
        count = table.get("count", 1)
        names = [kind.name] if count == 1 else [f"{kind.name}-{number}" for number in range(1, count + 1)]
        machines += [replace(kind, name=name) for name in names]
        if len(machines) > MAX_MACHINES:
            raise InputError(f"{source}: more than {MAX_MACHINES} machines are too many to plan; plan for fewer.")
    seen: set[str] = set()
    for machine in machines:
        if machine.name in seen:
            raise InputError(f"{source}: two machines are called {describe(machine.name)}; give each its own name.")
        seen.add(machine.name)
    return tuple(machines)


def _read_machine(table: Mapping[str, Any], where: str) -> Machine:
    for key in table:
        if key not in MACHINE_KEYS:
            raise InputError(f"{where} has no key {describe(key)}; {suggest(key, MACHINE_KEYS)}")
    numbers = {key: _read_number(key, table[key], where) for key in NUMBER_KEYS if key in table}
    name = _read_name(table, where)
    accelerator = _find_accelerator(table, where)
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


def _read_name(table: Mapping[str, Any], where: str) -> str:
    name = table.get("name", table.get("kind", ""))
    if not isinstance(name, str) or not 0 < len(name) <= 64 or not name.isprintable():
        raise InputError(f"{where} has the name {describe(name)}; give it 1 to 64 printable characters.")
    return name


def _find_accelerator(table: Mapping[str, Any], where: str) -> Accelerator | None:
    if "kind" not in table:
        return None
    kind = table["kind"]
    if not isinstance(kind, str) or kind not in ACCELERATORS:
        raise InputError(f"{where} has the unknown kind {describe(kind)}; {suggest(str(kind), ACCELERATORS)}")
    return ACCELERATORS[kind]


def _read_number(key: str, value: object, where: str) -> float:
    bounds = NUMBER_KEYS[key]
    is_number = isinstance(value, int if key == "count" else int | float) and not isinstance(value, bool)
    expected = "an integer" if key == "count" else "a number"
    if not isinstance(value, int | float) or not is_number or not math.isfinite(value):
        raise InputError(f"{where} has {key} {describe(value)}, which is not {expected}; give its {bounds.what}.")
    if not bounds.least <= value <= bounds.most:
        raise InputError(
            f"{where} has {key} {value:g}; give its {bounds.what}, {bounds.least:g} to {bounds.most:g}, or leave the "
            "machine out."
        )
    return float(value)
