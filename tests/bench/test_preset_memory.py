"""The computed tables of docs/reference/presets.md are what the cost model gives, and its prose about them holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from agora_protocol.ids import Span
from agora_protocol.manifest import preset
from benchmarks.preset_memory import CARDS, NAMES, fitting_stages, tables, tokens_per_second

from agora.cost.manifest_cost import run_cost

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "presets.md"
"""To write it anew: python -m benchmarks.preset_memory, with scripts/ on the path."""


def test_the_page_has_the_tables_as_they_are_computed() -> None:
    page = PAGE.read_text()
    for lines in tables():
        assert "\n".join(lines) in page


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_of_a_large_preset_fits_on_a_home_card(name: str) -> None:
    cost = run_cost(preset(name), in_16_bits=True)
    last = cost.stage_count - 1
    assert all(fitting_stages(cost, 8, stage, 1) >= 1 for stage in range(last)), "8 GB for all but the last"
    assert fitting_stages(cost, 12, last, -1) >= 1


def test_eleven_cards_of_24_gb_hold_the_largest_once() -> None:
    cost = run_cost(preset("8b"), in_16_bits=True)
    (card,) = (card for card in CARDS if card.name == "A10G")
    assert cost.stage_count == 11 * 4
    rates = [tokens_per_second(cost, card, Span(first, first + 3)) for first in range(0, 44, 4)]
    assert all(fitting_stages(cost, 24, first, 1) >= 4 for first in range(0, 44, 4))
    assert rates[1] == pytest.approx(8500, rel=0.01) and rates[-1] == max(rates) == pytest.approx(9300, rel=0.01)
