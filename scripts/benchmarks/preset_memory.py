"""Prints the tables of docs/reference/presets.md: stage memory of the large presets, which cards hold how many, speed.

    python -m benchmarks.preset_memory

Source of the layer times: those that Zorse publishes with its code (arXiv 2507.10392), milliseconds of a forward and
backward of one Llama-7B layer, 16-bit, for one sequence of 1,024 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from agora_protocol.ids import Span
from agora_protocol.manifest import preset

from agora.cost.manifest_cost import run_cost
from agora.cost.run_cost import Machine, RunCost

NAMES: Final = ("150m", "1b", "8b")
CARDS_GIB: Final = (8, 12, 24, 80)
GIB: Final = 2**30
OVERHEAD: Final = 1 * GIB  # what the GPU's context, its libraries and the display take of a card
LAYER_TOKENS: Final = 1024
# Operations behind a layer time: products of Llama-7B's matrices and causal attention, forward and backward.
LAYER_FLOPS: Final = 3 * (2 * LAYER_TOKENS * (4 * 4096**2 + 3 * 4096 * 11_008) + 2 * LAYER_TOKENS**2 * 4096)
LINKS_MBIT: Final = (20, 100, 1000)


@dataclass(frozen=True, slots=True)
class Card:
    """A measured GPU. layer_ms: forward and backward of one layer, see the module. memory_gib: what it has."""

    name: str
    memory_gib: int
    layer_ms: float

    @property
    def flops(self) -> float:
        return LAYER_FLOPS / self.layer_ms * 1e3


CARDS: Final = (
    Card("T4", 16, 15.24 + 42.58),
    Card("L4", 24, 9.78 + 22.85),
    Card("A10G", 24, 7.79 + 16.25),
    Card("A6000", 48, 4.45 + 10.09),
    Card("A100", 80, 2.09 + 4.15),
)


def fitting_stages(cost: RunCost, gib: int, first: int, step: int) -> int:
    """Returns how many stages fit on a card of `gib`: a span from `first` on if `step` is 1, down to it if it is -1."""
    count = 0
    while 0 <= first + step * count < cost.stage_count:
        ends = sorted((first, first + step * count))
        if cost.memory(Span(*ends)).device > gib * GIB - OVERHEAD:
            break
        count += 1
    return count


def memory_rows(name: str, cost: RunCost) -> Iterator[list[str]]:
    """Yields a preset's rows of the memory table: its first stage, an inner one, its last."""
    last = cost.stage_count - 1
    for what, stage, step in (("the first", 0, 1), ("an inner one", 1, 1), ("the last", last, -1)):
        gib = cost.memory(Span(stage, stage)).device / GIB
        fit = [fitting_stages(cost, card, stage, step) for card in CARDS_GIB]
        yield [name, what, f"{gib:.1f}", *(str(count) for count in fit)]


def tokens_per_second(cost: RunCost, card: Card, span: Span) -> float:
    """Returns what a card computes at a span, in the fastest way for which it has the memory."""
    machine = Machine(card.name, card.flops, card.memory_gib * GIB - OVERHEAD, upload=math.inf, download=math.inf)
    return cost.tokens * cost.rate(machine, span).microbatches


def speed_row(name: str, cost: RunCost) -> list[str]:
    """Returns a preset's row of tokens per second: of each card with one stage, and with as many as it has room for."""
    cells = []
    for card in CARDS:
        count = max(1, fitting_stages(cost, card.memory_gib, 1, 1))
        one, many = (tokens_per_second(cost, card, Span(1, held)) for held in (1, count))
        cells.append(f"{one:,.0f}; {many:,.0f} of {count}")
    return [name, *cells]


def link_row(name: str, cost: RunCost) -> list[str]:
    """Returns a preset's row of the bytes that a token costs an uplink, and the tokens per second that it allows."""
    bytes_per_token = cost.upload_bytes(Span(1, 1)) / cost.tokens
    return [name, f"{bytes_per_token:,.0f}", *(f"{mbit * 125_000 / bytes_per_token:,.0f}" for mbit in LINKS_MBIT)]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def tables() -> list[list[str]]:
    """Returns the tables of docs/reference/presets.md that are computed, each as its lines."""
    costs = {name: run_cost(preset(name), in_16_bits=True) for name in NAMES}
    memory = [row for name, cost in costs.items() for row in memory_rows(name, cost)]
    return [
        table(["preset", "stage", "GiB", *(f"{card} GB" for card in CARDS_GIB)], memory),
        table(
            ["preset", *(f"{card.name}, {card.memory_gib} GB" for card in CARDS)],
            [speed_row(*c) for c in costs.items()],
        ),
        table(
            ["preset", "bytes sent for a token", *(f"{mbit:,} Mbit/s" for mbit in LINKS_MBIT)],
            [link_row(*c) for c in costs.items()],
        ),
    ]


if __name__ == "__main__":
    print("\n\n".join("\n".join(lines) for lines in tables()))
