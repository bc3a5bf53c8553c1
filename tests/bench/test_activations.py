"""The benchmark of activations: its ways are three, and a row of a small span tells them apart."""

from __future__ import annotations

import pytest
from benchmarks import activations
from benchmarks.activations import WAYS, measure_way


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_measured(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "WIDTH", 64)
    monkeypatch.setattr(activations, "CONTEXT", 16)
    row = measure_way(way, 2, 1)
    assert float(row["microbatch_s"] or 0) > 0 and float(row["peak_mib"] or 0) >= 0
