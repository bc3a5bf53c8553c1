"""Whatever a stranger sends: a typed refusal or a valid object, soon, and within the limits. Never anything else."""

from __future__ import annotations

from typing import Any

import pytest
from agora_protocol.errors import ProtocolError
from agora_protocol.records import open_record

from .fuzz_cases import EXPECTED, MEMORY_SAMPLE, RARE, SHARE, Case, Vectors, judge, make_cases, memory, read_frame

pytestmark = pytest.mark.timeout(3600)  # the million cases of the slow tier take minutes


@pytest.fixture(scope="module")
def cases(vectors: Vectors, make_script: Any) -> dict[str, Case]:
    return make_cases(vectors, make_script)


@pytest.mark.parametrize("target", SHARE)
def test_mutated_input_is_accepted_or_refused_by_its_word(target: str, cases: dict[str, Case], fuzz_cases: int) -> None:
    outcomes = judge(cases[target], 0, int(fuzz_cases * SHARE[target]))
    assert EXPECTED[target] <= outcomes.keys() <= EXPECTED[target] | RARE.get(target, set()), outcomes
    assert outcomes.total() == int(fuzz_cases * SHARE[target])


@pytest.mark.parametrize("target", SHARE)
def test_mutated_input_takes_no_memory_beyond_the_limits(target: str, cases: dict[str, Case]) -> None:
    memory(cases[target], MEMORY_SAMPLE)


def test_every_truncation_of_every_frame_and_record_is_refused(vectors: Vectors) -> None:
    for vector in vectors("frames"):
        data = vector["bytes"]
        for cut in range(len(data)):
            with pytest.raises(ProtocolError):
                read_frame(data[:cut])
    for vector in vectors("records"):
        how = {"run": vector["run"], "key": vector["key"], "subkey_peer": vector["subkey"], "now_unix": 0.0}
        for cut in range(len(vector["sealed"])):
            with pytest.raises(ProtocolError):
                open_record(vector["sealed"][:cut], **how)
