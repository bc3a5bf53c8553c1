"""Claims about the numbers of a daemon's starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from agora_protocol.errors import DiskError

from agora.node.daemon_context import INCARNATION_GAP_NS, MAX_INCARNATION, next_incarnation

NOW = 1_790_000_000_000_000_000
HOUR_NS = 3600 * 10**9


def test_a_start_after_the_clock_was_set_back_has_the_greater_number(tmp_path: Path) -> None:
    file = tmp_path / "incarnation"
    assert next_incarnation(file, NOW) == NOW
    assert next_incarnation(file, NOW - HOUR_NS) == NOW + INCARNATION_GAP_NS
    assert next_incarnation(file, NOW + HOUR_NS) == NOW + HOUR_NS


@pytest.mark.parametrize("text", ["", "soon", "-5", str(MAX_INCARNATION), "\udcff"])
def test_a_file_that_holds_no_sound_number_says_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "incarnation"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert next_incarnation(file, NOW) == NOW


def test_a_number_that_cannot_be_kept_is_a_clean_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="free some space"):
        next_incarnation(tmp_path / "missing" / "incarnation", NOW)
