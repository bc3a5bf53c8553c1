"""The example that shows the loop of a step without a network: it runs, and it learns."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from statistics import fmean

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "one_process.py"


def test_two_stages_at_two_peers_each_learn_together(capsys: pytest.CaptureFixture[str]) -> None:
    losses = asyncio.run(runpy.run_path(str(EXAMPLE))["main"](steps=4))
    assert len(losses) >= 2 * 4, "both replicas of the last stage took every step"
    assert fmean(losses[-4:]) < fmean(losses[:2]) - 1.0
    assert "tokens of all replicas" in capsys.readouterr().out
