"""The stream part: both carriers carry the same bytes, in real processes, and the ratio divides the right way."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import stream_rates
from benchmarks.children import ChildProcesses
from benchmarks.stream_rates import FLOW_BYTES, FLOW_COUNT, TRIPS, Streams, measure_streams


def test_the_ratio_is_ours_over_the_bare_streams() -> None:
    ours = stream_rates._Readings({name: [2.0, 4.0] for name in TRIPS}, [300.0, 200.0])
    bare = stream_rates._Readings({name: [1.0, 1.0] for name in TRIPS}, [200.0, 200.0])
    found = stream_rates.summary({"agora": ours, "bare": bare})
    assert found.ratio.value == pytest.approx(1.25) and found.ratio.target == ">= 0.9"
    by_name = {row["name"]: row for row in found.rows}
    assert by_name["agora: round trip 64 KB"]["median"] == 3.0 and by_name["agora: round trip 64 KB"]["unit"] == "ms"
    assert by_name["bare: one stream"]["unit"] == "MB/s"


@pytest.mark.process
@pytest.mark.timeout(120)
def test_both_carriers_carry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_rates, "TRIPS", {"round trip 64 KB": (65_536, 2)})
    monkeypatch.setattr(stream_rates, "FLOW_COUNT", 5)
    with ChildProcesses(tmp_path) as nursery:
        found: Streams = measure_streams(nursery, 2)
    assert [row["name"] for row in found.rows] == [
        "agora: round trip 64 KB",
        "agora: one stream",
        "bare: round trip 64 KB",
        "bare: one stream",
    ]
    assert all(isinstance(row["low"], float) and row["low"] > 0 and row["rounds"] == 2 for row in found.rows)
    assert found.ratio.value > 0


def test_the_payloads_are_those_of_the_contract() -> None:
    assert [size for size, _ in TRIPS.values()] == [64 * 1024, 4 * 1024**2]
    assert FLOW_BYTES * FLOW_COUNT >= 100e6
