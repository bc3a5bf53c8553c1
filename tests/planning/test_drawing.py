"""A plan's table and picture show who holds what, what is slowest, and nothing that a name could smuggle in."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from agora_protocol.ids import Span

from agora.cost.run_cost import Machine, RunCost, SpanRate, StageCost
from agora.planning.drawing import picture_lines, picture_svg, plan_rows, plan_table
from agora.planning.plan import Assignment, Bottleneck, Plan

FAST = Machine("fast", 1e12, 8e9, upload=1e6, download=1e6)
HOME = Machine("<b>&home", 1e11, 4e9, host_memory=16e9, upload=1e5, download=1e5)


def cost_of(stages: int) -> RunCost:
    """A run of equal stages; a microbatch has 100 tokens."""
    stage = StageCost(1e9, 2e9, trained_bytes=1e8, optimizer_bytes=2e8)
    return RunCost([stage] * stages, forward_bytes=1e4, backward_bytes=1e4, tokens=100, in_flight=2)


def plan_of(stages: int) -> Plan:
    """Two equal machines at the first half, one at the rest, and one idle."""
    middle = stages // 2
    first, rest = Span(0, middle - 1), Span(middle, stages - 1)
    twins = [Machine(f"twin-{number}", 1e12, 8e9) for number in (1, 2)]
    return Plan(
        (
            Assignment(HOME, rest, SpanRate(3.0, "upload", in_host=True), share=1.0),
            *(Assignment(twin, first, SpanRate(2.5, "compute"), share=0.5) for twin in twins),
            Assignment(FAST, None, SpanRate(0.0, "memory")),
        ),
        (5.0,) * middle + (3.0,) * (stages - middle),
        3.0,
        Bottleneck(rest, "upload"),
    )


def test_equal_machines_share_a_row_and_idle_ones_come_last() -> None:
    rows = plan_rows(plan_of(4))
    assert [(row.label, row.machine_count) for row in rows] == [("twin-1, twin-2", 2), ("<b>&home", 1), ("fast", 1)]


def test_the_table_says_stages_share_speed_limit_and_memory() -> None:
    lines = plan_table(cost_of(4), plan_of(4))
    assert lines[0].split() == ["MACHINES", "STAGES", "SHARE", "TOK/S", "LIMIT", "MEMORY", "AVAILABLE"]
    assert lines[1].split("  ")[0] == "twin-1, twin-2"
    assert "0-1" in lines[1] and "50.0 % each" in lines[1] and " 500 " in lines[1] and "0.60 GB" in lines[1]
    assert "+ 0.4 host" in lines[2] and "upload" in lines[2]
    assert "idle" in lines[3]


def test_the_picture_has_a_bar_for_each_row_and_marks_the_slowest_stages() -> None:
    lines = picture_lines(cost_of(4), plan_of(4))
    assert [line[28:].strip() for line in lines] == ["0  3", "##..  compute", "..##  upload", "....  idle", "^^"]
    assert lines[-1].index("^") == lines[2].index("#")


def test_many_stages_fit_into_one_line() -> None:
    lines = picture_lines(cost_of(200), plan_of(200))
    assert max(map(len, lines)) <= 28 + 2 + 64 + 10
    assert lines[1].count("#") == lines[2].count("#") == 32


def test_one_stage_is_drawn_too() -> None:
    plan = Plan(
        (Assignment(FAST, Span(0, 0), SpanRate(1.0, "compute"), share=1.0),),
        (1.0,),
        1.0,
        Bottleneck(Span(0, 0), "compute"),
    )
    assert picture_lines(cost_of(1), plan)[1].endswith("#  compute")


def test_the_svg_is_xml_in_which_names_are_text() -> None:
    text = picture_svg(cost_of(4), plan_of(4), "a <run>\x1b")
    root = ET.fromstring(text)
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<b>&home" in words and "a <run>\N{REPLACEMENT CHARACTER}" in words
    assert any("500 tok/s, compute" in word for word in words) and "idle" in words
    bars = [element for element in root.iter("{http://www.w3.org/2000/svg}rect") if element.get("rx")]
    assert len(bars) == 2
