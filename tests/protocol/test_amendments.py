"""Claims about amendments as bytes, and about the manifest that they make of a run's core at each step."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

import pytest
from agora_protocol.amendments import (
    AMENDABLE,
    NOTICE,
    Amendment,
    check_follows,
    check_key,
    manifest_at,
    open_amendment,
    seal_amendment,
    with_changes,
)
from agora_protocol.amendments import (
    CORE as CORE_REASONS,
)
from agora_protocol.errors import AmendmentError, ManifestError, ProtocolError
from agora_protocol.identity import Identity
from agora_protocol.ids import RunId
from agora_protocol.limits import (
    MAX_AMENDMENT_BYTES,
    MAX_ANSWER_HEADER_BYTES,
    MAX_CHANGES_BYTES,
    MAX_HEADER_BYTES,
    MAX_KEPT_AMENDMENTS,
    MAX_PROOF_BYTES,
    MAX_SHARED_AMENDMENTS,
)
from agora_protocol.manifest import Manifest
from agora_protocol.messages import KnownAmendments, ShareAmendments
from agora_protocol.packing import pack, pack_canonical

RUN, OTHER_RUN = RunId("ab" * 32), RunId("cd" * 32)
FOUNDER, STRANGER = (Identity(bytes([n]) * 32) for n in range(1, 3))
CORE = Manifest()


def amendment(values: Mapping[str, Any], from_step: int = 100, number: int = 1, signed_step: int = 0) -> Amendment:
    return Amendment(
        FOUNDER.peer, number, bytes.fromhex(RUN), signed_step, from_step, 5, pack_canonical(dict(values)), b""
    )


RATE = {"optimizer.learning_rate": 0.001}


def test_what_is_sealed_is_opened_and_is_of_one_run_and_one_signer() -> None:
    made = amendment(RATE)
    sealed = seal_amendment(made, RUN, FOUNDER)
    opened = open_amendment(sealed, RUN)
    assert opened.amendment == made and opened.sealed == sealed and opened.amendment.values == RATE
    with pytest.raises(ProtocolError, match="only be sealed by its issuer"):
        seal_amendment(made, RUN, STRANGER)
    for data, run in ((sealed, OTHER_RUN), (sealed[:-1] + bytes([sealed[-1] ^ 1]), RUN)):
        with pytest.raises(ProtocolError) as caught:
            open_amendment(data, run)
        assert caught.value.code == "bad-signature"


def test_its_hash_is_of_what_was_signed_and_of_the_run() -> None:
    hashes = {
        open_amendment(seal_amendment(made, run, FOUNDER), run).hash
        for run in (RUN, OTHER_RUN)
        for made in (amendment(RATE), amendment(RATE, from_step=101))
    }
    assert len(hashes) == 4


def test_the_longest_messages_of_amendments_fit_into_their_frames() -> None:
    longest = bytes(MAX_AMENDMENT_BYTES)
    assert len(pack(ShareAmendments((longest,) * MAX_SHARED_AMENDMENTS).to_fields())) < MAX_HEADER_BYTES - 64
    assert len(pack(KnownAmendments((longest,) * MAX_KEPT_AMENDMENTS).to_fields())) < MAX_ANSWER_HEADER_BYTES - 64
    assert MAX_CHANGES_BYTES + MAX_PROOF_BYTES + 512 < MAX_AMENDMENT_BYTES


def test_each_step_has_the_changes_of_the_amendments_up_to_it_in_order() -> None:
    chain = [
        amendment({"optimizer.total_steps": 4000, "optimizer.learning_rate": 0.001}, 100, 1),
        amendment({"optimizer.learning_rate": 0.002}, 200, 2),
        amendment({"optimizer.learning_rate": 0.004}, 200, 3),
    ]
    rates = [manifest_at(CORE, chain, step).optimizer.learning_rate for step in (0, 99, 100, 199, 200, 10**6)]
    assert rates == [0.003, 0.003, 0.001, 0.001, 0.004, 0.004]
    assert manifest_at(CORE, chain, 99) is CORE
    assert manifest_at(CORE, chain, 200).optimizer.total_steps == 4000
    assert manifest_at(CORE, [], 7) is CORE


def test_amended_values_change_nothing_but_themselves_whatever_chain_there_is() -> None:
    rng = random.Random(7)
    for _ in range(200):
        chain, step, expected = list[Amendment](), 0, CORE
        for number in range(1, rng.randint(1, 6)):
            step += rng.randint(0, 50) + (number == 1)
            values = {
                "optimizer.learning_rate": rng.uniform(1e-5, 1.0),
                "optimizer.warmup_steps": rng.randint(0, 50),
                "optimizer.minimum_ratio": rng.random(),
                "optimizer.target_tokens": CORE.tokens_per_microbatch * rng.randint(1, 9),
            }
            chosen = {key: values[key] for key in rng.sample(sorted(values), rng.randint(1, 4))}
            chain.append(amendment(chosen, step, number))
            expected = with_changes(expected, chosen)
            assert manifest_at(CORE, chain, step) == manifest_at(CORE, chain, 10**9) == expected
            assert manifest_at(CORE, chain, chain[0].from_step - 1) is CORE
        core = CORE.model_dump() | {"optimizer": None}
        assert expected.model_dump() | {"optimizer": None} == core


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("model.layers", "core of the manifest, which holds for the life of the run"),
        ("optimizer.name", "core of the manifest"),
        ("seed", "core of the manifest"),
        ("optimizer.totalsteps", "did you mean 'optimizer.total_steps'"),
        ("speed", "There is no key 'speed'"),
    ],
)
def test_a_key_that_cannot_be_amended_says_why(key: str, says: str) -> None:
    with pytest.raises(AmendmentError, match=says):
        check_key(key)


def test_every_other_key_of_a_manifest_is_refused_with_a_reason_of_its_own() -> None:
    whole = CORE.model_dump()
    keys = [f"{name}.{key}" for name, values in whole.items() if isinstance(values, dict) for key in values]
    for key in (*keys, "name", "seed", "founder"):
        if key in AMENDABLE:
            continue
        reason = CORE_REASONS.get(key) or CORE_REASONS[key.partition(".")[0]]
        with pytest.raises(AmendmentError, match=re.escape(f"{key} belongs to the core")) as caught:
            check_key(key)
        assert reason in str(caught.value)
    assert "Of [averaging] an amendment may change averaging.gradient_wire, " in refusal_of("averaging.every")
    assert "an amendment may change" not in refusal_of("objective.kind")


def refusal_of(key: str) -> str:
    with pytest.raises(AmendmentError) as caught:
        check_key(key)
    return str(caught.value)


@pytest.mark.parametrize(
    ("averaging", "fraction", "says"),
    [
        ({}, 0.02, None),
        ({}, 1.0, "with fewer than 2 fragments"),
        ({"fraction": 1.0}, 0.1, "with fewer than 2 fragments"),
        ({"exact_steps": 0}, 0.1, "a part of every replica's state"),
        ({"local_steps": "never"}, 0.1, "a part of every replica's state"),
    ],
)
def test_the_number_of_fragments_is_amended_where_it_is_voted_on(
    averaging: dict[str, Any], fraction: float, says: str | None
) -> None:
    core = CORE.with_values(averaging=averaging)
    made = amendment({"averaging.fraction": fraction})
    if says is None:
        check_follows(made, core, [])
        return
    with pytest.raises(AmendmentError, match=says):
        check_follows(made, core, [])


def test_every_amendable_key_is_one_of_the_manifest() -> None:
    for key in AMENDABLE:
        check_key(key)
        section, _, name = key.partition(".")
        assert name in type(getattr(CORE, section)).model_fields


def test_an_amendment_needs_notice_unless_the_run_is_over() -> None:
    total = CORE.optimizer.total_steps
    check_follows(amendment(RATE, 50 + NOTICE, signed_step=50), CORE, [])
    longer = {"optimizer.total_steps": total + 100}
    check_follows(amendment(longer, total, signed_step=total), CORE, [])
    for late, values in ((amendment(RATE, 49 + NOTICE, signed_step=50), "use --from-step 70 or later"),
                         (amendment(longer, total - 1, signed_step=total), "too near")):  # fmt: skip
        with pytest.raises(AmendmentError, match=values):
            check_follows(late, CORE, [])


@pytest.mark.parametrize(
    ("values", "from_step", "says"),
    [
        ({"optimizer.target_tokens": 1000}, 100, "is not a multiple .* use target_tokens = 1024"),
        ({"optimizer.warmup_steps": 2000}, 100, "leaves nothing of total_steps"),
        ({"optimizer.learning_rate": -1.0}, 100, "learning_rate"),
        ({"optimizer.total_steps": "many"}, 100, "total_steps"),
        ({"optimizer.total_steps": 500}, 600, "would have ended after 500 steps"),
        ({"optimizer.total_steps": 5000}, 2001, "ends after 2000 steps, before step 2001"),
        ({"data.weights": [1.0, 2.0]}, 100, "weights has 2 numbers where corpus has 1 entries"),
        ({"data.weights": [0.0]}, 100, "weights are all 0"),
        (RATE, 70, "in force from step 80, so the next cannot be from step 70"),
    ],
)
def test_what_does_not_fit_the_run_is_refused_with_what_to_do(
    values: dict[str, Any], from_step: int, says: str
) -> None:
    before = [amendment(RATE, 80)]
    with pytest.raises(AmendmentError, match=says):
        check_follows(amendment(values, from_step, 2), CORE, before)


def test_values_that_do_not_fit_are_an_error_of_the_manifest() -> None:
    with pytest.raises(ManifestError):
        manifest_at(CORE, [amendment({"optimizer.warmup_steps": 10**9})], 100)
