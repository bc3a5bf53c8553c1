"""A peer written from SPEC.md on py-libp2p, against a real daemon: handshake, status, the same gradient, each refusal.

The outsider (outsider.py) runs in a process of its own; here its orders are made and its answers judged.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agora_protocol.manifest import Manifest, SignedManifest

from agora.model import family_of
from agora.train.objectives import stage_loss
from tests.process.harness import Daemon, Swarm, swarm

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

BATCH, CONTEXT, WIDTH = 2, 16, 32

REFUSALS = {
    "request_before_hello": "out-of-order",
    "hello_of_another_run": "wrong-run",
    "hello_of_no_version": "bad-message",
    "run_of_a_wrong_length": "bad-message",
    "second_hello": "out-of-order",
    "bad_magic": "bad-frame",
    "unknown_frame_type": "bad-frame",
    "reserved_bits": "bad-frame",
    "header_beyond_the_limit": "too-large",
    "payload_beyond_the_limit": "too-large",
    "header_that_is_no_msgpack": "bad-message",
    "header_of_deep_nesting": "bad-message",
    "unknown_message_kind": "unsupported",
    "answer_of_unknown_kind": "bad-message",
    "answer_as_request": "bad-message",
    "call_id_of_the_other_side": "out-of-order",
    "answer_to_no_call": "out-of-order",
    "deadline_of_zero": "bad-message",
    "deadline_beyond_the_limit": "bad-message",
    "short_microbatch_id": "bad-message",
    "origin_that_is_no_peer": "bad-message",
    "unknown_purpose": "bad-message",
    "stage_not_held": "not-my-stage",
    "stage_beyond_the_run": "not-my-stage",
    "tensor_of_unknown_dtype": "bad-tensor",
    "tensor_of_another_dtype": "bad-tensor",
    "tensor_of_another_shape": "bad-tensor",
    "tensors_that_do_not_add_up": "bad-tensor",
    "no_tensors": "bad-tensor",
    "boundary_reshaped": "bad-tensor",
    "boundary_not_finite": "bad-tensor",
    "token_beyond_the_vocabulary": "bad-tensor",
    "reader_trains": "not-admitted",
    "call_id_used_twice": "out-of-order",
}


def small() -> Manifest:
    """One stage after the origin's; float32 boundaries, so that gradients can be compared closely."""
    base = Manifest(name="conformance").model_dump()
    base["model"] |= {"width": WIDTH, "subspace": WIDTH, "layers": 2, "heads": 2, "key_value_heads": 1}
    base["model"] |= {"feed_forward": 64, "context": CONTEXT}
    base["stages"] = {"count": 2}
    base["boundary"]["codec"] = "float32"
    base["schedule"] |= {"microbatch": BATCH}
    # No step may come between the outsider's microbatches, so that the stage's weights stay those of the seed.
    base["optimizer"] |= {"target_tokens": BATCH * CONTEXT * 4096}
    return Manifest.model_validate(base)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Swarm, Daemon]]:
    """A real daemon that holds the last stage, and nobody else."""
    with swarm(tmp_path_factory.mktemp("conformance"), small()) as made:
        daemon = made.start("last", "1")
        made.serving()
        yield made, daemon
        assert daemon.process.poll() is None, made.logs()


def outsider(node: tuple[Swarm, Daemon], *tasks: dict[str, Any], alone: bool = False) -> list[dict[str, Any]]:
    """What the outsider reports of these tasks, done one after the other: by one peer, or each by a peer of its own."""
    started = node[1].events("PeerStarted")[0]
    address = next(a for a in started["addresses"] if "/127.0.0.1/" in a)
    order = {"address": address, "run": started["run"], "tasks": list(tasks), "alone": alone}
    program = Path(__file__).with_name("outsider.py")
    done = subprocess.run(
        [sys.executable, str(program)],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert len(results) == len(tasks)
    return list(results)


def microbatch() -> tuple[torch.Tensor, torch.Tensor, list[dict[str, Any]]]:
    """A boundary, tokens, and both as the outsider sends them."""
    generator = torch.Generator().manual_seed(3)
    boundary = torch.randn(BATCH, CONTEXT, WIDTH, generator=generator)
    tokens = torch.randint(0, 256, (BATCH, CONTEXT + 1), generator=generator, dtype=torch.int32)
    wire = [
        {
            "dtype": "float32",
            "shape": list(boundary.shape),
            "data": base64.b64encode(boundary.numpy().tobytes()).decode(),
        },
        {"dtype": "int32", "shape": list(tokens.shape), "data": base64.b64encode(tokens.numpy().tobytes()).decode()},
    ]
    return boundary, tokens, wire


def test_an_outsider_shakes_hands_and_learns_the_status(node: tuple[Swarm, Daemon]) -> None:
    shaken, observed, status, manifest = outsider(
        node,
        {"do": "handshake"},
        {"do": "handshake", "reader": True},
        {"do": "ask", "what": "status"},
        {"do": "ask", "what": "manifest"},
    )
    run = node[1].events("PeerStarted")[0]["run"]
    assert shaken["version"] == 1 and shaken["is_of_run"] and observed["is_of_run"]
    shown = json.loads(base64.b64decode(status["body"]))
    assert shown["schema"] == 1 and shown["run_id"] == run
    assert shown["health"]["state"] in ("STALLED", "DEGRADED")
    assert [peer["peer"] for peer in shown["peers"]] == [node[1].peer]
    signed = SignedManifest.from_bytes(base64.b64decode(manifest["body"]))
    assert signed.run_id == run


def test_an_outsider_gets_the_gradient_that_a_node_would(node: tuple[Swarm, Daemon]) -> None:
    boundary, tokens, wire = microbatch()
    (done,) = outsider(node, {"do": "process", "tensors": wire, "fields": {}})
    (answer,) = done["answers"]

    manifest = node[0].manifest
    stage = family_of(manifest.model).build_stage(manifest.layers_of(1), manifest.seed)
    hidden = boundary.clone().requires_grad_()
    loss = stage_loss(stage(hidden, tokens[:, :-1]), tokens[:, 1:])
    loss.backward()

    assert answer["tokens"] == BATCH * CONTEXT
    assert answer["loss_sum"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert answer["tensors"] == [["float32", [BATCH, CONTEXT, WIDTH]]]
    gradient = np.frombuffer(base64.b64decode(answer["gradient"]), dtype="<f4").reshape(BATCH, CONTEXT, WIDTH)
    assert hidden.grad is not None
    np.testing.assert_allclose(gradient, hidden.grad.numpy(), rtol=1e-4, atol=1e-6)
    assert answer["progress"][0] == "accepted"


def test_a_repeat_is_answered_and_not_counted_twice(node: tuple[Swarm, Daemon]) -> None:
    _, _, wire = microbatch()
    (done,) = outsider(node, {"do": "process", "tensors": wire, "fields": {}, "times": 2})
    first, again = done["answers"]
    assert first["gradient"] == again["gradient"] and first["loss_sum"] == again["loss_sum"]
    counted = [e["microbatch"] for e in node[1].events("MicrobatchCounted")]
    assert len(counted) == len(set(counted))
    node[0].until(lambda: node[1].events("RepeatServed"), "the repeat in the journal")


def test_evaluation_brings_a_loss_and_no_gradient(node: tuple[Swarm, Daemon]) -> None:
    _, _, wire = microbatch()
    before = len(node[1].events("MicrobatchCounted"))
    (done,) = outsider(node, {"do": "process", "tensors": wire, "fields": {"purpose": "evaluate"}})
    (answer,) = done["answers"]
    assert answer["tensors"] == [] and answer["gradient"] == "" and answer["loss_sum"] > 0
    assert len(node[1].events("MicrobatchCounted")) == before


def test_what_the_spec_forbids_is_refused_with_its_typed_error(node: tuple[Swarm, Daemon]) -> None:
    """Each by a peer of its own: who breaks the protocol again and again is soon not listened to at all."""
    _, _, wire = microbatch()
    results = outsider(node, *({"do": "violate", "name": name, "tensors": wire} for name in REFUSALS), alone=True)
    got = {name: result.get("code", result) for name, result in zip(REFUSALS, results, strict=True)}
    assert got == REFUSALS


def test_a_peer_with_too_many_offences_is_suspended(node: tuple[Swarm, Daemon]) -> None:
    _, _, wire = microbatch()
    before = len(node[1].events("OffenceRecorded"))
    results = outsider(node, *([{"do": "violate", "name": "bad_magic", "tensors": wire}] * 8))
    codes = [result.get("code") or result.get("refused") for result in results]
    assert codes[0] == "bad-frame" and codes[-1] == "not-admitted", codes
    new = codes.count("bad-frame")
    node[0].until(lambda: len(node[1].events("OffenceRecorded")) - before == new, f"{new} violations in the journal")


def test_the_node_goes_on_after_all_of_it(node: tuple[Swarm, Daemon]) -> None:
    _, _, wire = microbatch()
    (done,) = outsider(node, {"do": "process", "tensors": wire, "fields": {}})
    assert done["answers"][0]["tokens"] == BATCH * CONTEXT
    assert node[1].process.poll() is None
