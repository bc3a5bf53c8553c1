"""A subspace below the width: k numbers and the token id are the whole residual stream, wherever the model is cut.

The reference tracks the residual in all d coordinates, with full output matrices W = U Z, in float64, and shares no
code with agora.model.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import SubspaceSection
from torch import Tensor

from agora.core.span_work import SpanWork
from agora.model import StageModule, family_of, fixed_tensors
from agora.model.subspace_stage import FIXED_SCALE, SubspaceStage
from agora.train.objectives import stage_loss
from tests.oracle import PlainRun, relative_difference, run_plain_loop
from tests.train.support import batches_for, microbatch_id, pipeline_of, small_manifest, tokens_of, train_step
from tests.tuning.test_llama_equivalence import attention, hugging_face_name, norm

SEED, WIDTH, RANK, VOCABULARY = 9, 48, 10, 50
MODEL = SubspaceSection(
    width=WIDTH,
    subspace=RANK,
    layers=4,
    heads=4,
    key_value_heads=2,
    feed_forward=56,
    context=12,
    vocabulary=VOCABULARY,
)
SAME_WIDTH = MODEL.model_copy(update={"subspace": WIDTH, "embedding": "fixed"})
STEPS = 5


def cut(model: SubspaceSection, count: int) -> list[StageModule]:
    """Away from the initial values, so that every tensor counts; the same whatever the cut."""
    size = model.layers // count
    stages = [family_of(model).build_stage(range(k * size, (k + 1) * size), SEED) for k in range(count)]
    with torch.no_grad():
        for number, parameter in enumerate(p for stage in stages for p in stage.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.mul_(2).add_(noise, alpha=0.1)
    return stages


def some_tokens(model: SubspaceSection, b: int = 2) -> Tensor:
    return torch.randint(model.vocabulary, (b, model.context), generator=torch.Generator().manual_seed(3))


def gradients(stages: list[StageModule], tokens: Tensor) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """Loss sum, gradients by name, and boundaries, each crossed as peers do: values there, gradient back."""
    entries, outputs = [], []
    hidden = tokens
    for stage in stages:
        entries.append(hidden if stage.is_first else hidden.detach().requires_grad_())
        hidden = stage(entries[-1], tokens)
        outputs.append(hidden)
    loss = stage_loss(hidden, tokens.roll(-1, 1))
    loss.backward()
    for output, entry in zip(reversed(outputs[:-1]), reversed(entries[1:]), strict=True):
        output.backward(entry.grad)
    found = {name: p.grad for stage in stages for name, p in stage.named_parameters() if p.grad is not None}
    return loss.item(), found, outputs[:-1]


# --- the reference


def words(what: str, count: int) -> list[int]:
    """Of the run's seed, as the specification says."""
    key = hashlib.sha256(f"agora {what} 1\0{SEED}".encode()).digest()[:16]
    return [int(w) for w in np.random.Philox(key=np.frombuffer(key, "<u8")).random_raw(count)]


def plain_basis() -> np.ndarray:
    """By whole matrices: Hadamard blocks, signs and permutations for width 48 = 3 x 16, four rounds."""
    hadamard = np.array([[1]])
    for _ in range(4):
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    turn = np.kron(np.eye(3), hadamard) / 4
    whole = np.eye(WIDTH)
    drawn = words(f"basis {WIDTH}", 4 * WIDTH)
    for start in range(0, 4 * WIDTH, WIDTH):
        row = drawn[start : start + WIDTH]
        order = sorted(range(WIDTH), key=row.__getitem__)
        whole = turn @ np.diag([1 - 2 * (word % 2) for word in row]) @ np.eye(WIDTH)[order] @ whole
    return whole[:, :RANK]


def plain_embedding() -> np.ndarray:
    """One word for each token, whose bits are its signs from the lowest on."""
    return np.array(
        [
            [1.0 if word >> i & 1 else -1.0 for i in range(WIDTH)]
            for word in words(f"fixed embedding {WIDTH}", VOCABULARY)
        ]
    )


@dataclass
class Reference:
    """The whole model in d coordinates. states: what every layer reads, [s, d] of each sequence."""

    model: SubspaceSection
    weights: dict[str, Tensor]
    states: list[Tensor] = field(default_factory=list)

    def loss(self, tokens: Tensor) -> Tensor:
        return sum((self._sequence(row) for row in tokens), torch.zeros(()))

    def _sequence(self, row: Tensor) -> Tensor:
        basis = torch.eye(WIDTH).double() if self.model.subspace == WIDTH else torch.from_numpy(plain_basis())
        w, x = self.weights, self._embedded(row, basis)
        for index in range(self.model.layers):
            self.states.append(x.detach())
            prefix = f"model.layers.{index}."
            part = {name.removeprefix(prefix): v for name, v in w.items() if name.startswith(prefix)}
            out, down = part["self_attn.o_proj.weight"], part["mlp.down_proj.weight"]
            if index < self.model.layers - 1:
                out, down = basis @ out, basis @ down
            x = x + attention(norm(x, part["input_layernorm.weight"], self.model), self._with(part, out), self.model)
            h = norm(x, part["post_attention_layernorm.weight"], self.model)
            gate = h @ part["mlp.gate_proj.weight"].T
            x = x + (gate * torch.sigmoid(gate) * (h @ part["mlp.up_proj.weight"].T)) @ down.T
        logits = norm(x, w["model.norm.weight"], self.model) @ w["lm_head.weight"].T
        return torch.nn.functional.cross_entropy(logits, row.roll(-1), reduction="sum")

    def _embedded(self, row: Tensor, basis: Tensor) -> Tensor:
        learnt = self.weights["model.embed_tokens.weight"] @ basis.T
        return (learnt + FIXED_SCALE * torch.from_numpy(plain_embedding()))[row]

    def _with(self, part: dict[str, Tensor], out: Tensor) -> dict[str, Tensor]:
        return part | {"self_attn.o_proj.weight": out}


def reference_of(model: SubspaceSection) -> Reference:
    named = {n: p.detach().double().requires_grad_() for n, p in cut(model, 1)[0].named_parameters()}
    return Reference(model, {hugging_face_name(name): p for name, p in named.items()})


# --- what the seed fixes


def test_basis_and_signs_are_the_products_of_plain_matrices() -> None:
    assert np.array_equal(fixed_tensors.derive_basis(SEED, WIDTH, RANK), plain_basis())
    assert np.array_equal(fixed_tensors.derive_embedding(SEED, VOCABULARY, WIDTH), plain_embedding())


@pytest.mark.parametrize("width", [2, 6, 24, 50, 128, 768, 1024])
def test_the_basis_is_orthonormal_to_the_last_bit_and_spread_over_all_coordinates(width: int) -> None:
    rank = max(width // 3, 1)
    basis = fixed_tensors.derive_basis(SEED, width, rank)
    exact = basis.astype(np.float64)
    assert basis.dtype == np.float32 and np.array_equal(exact.T @ exact, np.eye(rank))
    assert np.array_equal(fixed_tensors.derive_basis(SEED, width, rank + 1)[:, :rank], basis) or rank + 1 == width
    if width >= 128:
        assert (exact**2).sum(1).max() < 2 * rank / width, "no coordinate belongs to the subspace much more than others"
        assert not np.array_equal(fixed_tensors.derive_basis(SEED + 1, width, rank), basis)


def test_a_subspace_that_is_the_whole_space_has_the_identity_for_a_basis() -> None:
    assert np.array_equal(fixed_tensors.derive_basis(SEED, 24, 24), np.eye(24))


def test_the_bits_of_basis_and_embedding_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of other machines and versions must agree; a machine that does not says so before it trains."""
    fixed_tensors.check_derivation.cache_clear()
    fixed_tensors.check_derivation()
    pinned = "b6dd8460cd61ee1dfc1d8c770288a0ecf2f41e3f58c29979a61989144b69a38a"
    assert pinned == fixed_tensors.KNOWN_DIGEST
    fixed_tensors.check_derivation.cache_clear()
    monkeypatch.setattr(fixed_tensors, "derive_embedding_signs", lambda *sizes: np.zeros(3, np.uint8))
    with pytest.raises(fixed_tensors.DerivationError, match="b6dd8460cd61ee1d"):
        family_of(MODEL).build_stage(range(4), SEED)


def test_a_rows_signs_are_its_own_and_cost_a_bit_each() -> None:
    signs = fixed_tensors.derive_embedding_signs(SEED, 40_000, 100)
    assert signs.nbytes == 40_000 * 13
    assert np.array_equal(signs[:77], fixed_tensors.derive_embedding_signs(SEED, 77, 100))
    assert fixed_tensors.derive_embedding(SEED, 40_000, 100).mean() == pytest.approx(0, abs=5 / 2000)


def test_stages_hold_what_is_fixed_in_no_parameter_and_no_state() -> None:
    stage = cut(MODEL, 2)[1]
    assert not [name for name in stage.state_dict() if "space" in name]
    assert isinstance(stage, SubspaceStage)
    rows = stage.space.expand_for(torch.tensor([[3, 7, -1]]))(torch.zeros(1, 3, RANK))[0]
    assert torch.equal(rows, torch.from_numpy(FIXED_SCALE * plain_embedding()[[3, 7, 0]]).float())


# --- what a cut changes: nothing


@pytest.mark.parametrize("model", [MODEL, SAME_WIDTH], ids=["narrow", "same width"])
@pytest.mark.parametrize("count", [2, 4])
def test_loss_and_gradients_across_boundaries_are_those_without_a_boundary(model: SubspaceSection, count: int) -> None:
    tokens = some_tokens(model)
    loss, expected, _ = gradients(cut(model, 1), tokens)
    found_loss, found, boundaries = gradients(cut(model, count), tokens)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert [tuple(boundary.shape) for boundary in boundaries] == [(2, 12, model.subspace)] * (count - 1)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert relative_difference(gradient.numpy(), expected[name].numpy()) < 1e-6, name


@pytest.mark.parametrize("model", [MODEL, SAME_WIDTH], ids=["narrow", "same width"])
def test_coordinates_compute_what_full_matrices_and_a_full_residual_stream_compute(model: SubspaceSection) -> None:
    tokens = some_tokens(model)
    loss, found, _ = gradients([stage.double() for stage in cut(model, 4)], tokens)
    reference = reference_of(model)
    expected = reference.loss(tokens)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, gradient in found.items():
        plain = reference.weights[hugging_face_name(name)].grad
        assert plain is not None and plain.norm() > 0
        assert relative_difference(gradient.numpy(), plain.numpy()) < 1e-5, name


def test_without_its_fixed_part_the_full_residual_stream_lies_in_the_subspace_up_to_the_last_layer() -> None:
    tokens, reference, basis = some_tokens(MODEL, 1), reference_of(MODEL), plain_basis()
    reference.loss(tokens)
    fixed_part = FIXED_SCALE * plain_embedding()[tokens[0].numpy()]
    boundaries = gradients(cut(MODEL, 4), tokens)[2]
    for state, boundary in zip(reference.states[1:], boundaries, strict=True):
        rest = state.numpy() - fixed_part
        assert relative_difference(rest @ basis @ basis.T, rest) < 1e-12
        assert relative_difference(boundary[0].detach().numpy(), rest @ basis) < 1e-5


def test_a_stage_after_the_first_cannot_do_without_token_ids() -> None:
    with pytest.raises(ValueError, match="token ids"):
        cut(MODEL, 2)[1](torch.zeros(1, 12, RANK))


def test_no_position_sees_a_later_token() -> None:
    stage, tokens = cut(MODEL, 1)[0], some_tokens(MODEL)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCABULARY
    before, after = stage(tokens), stage(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 7], after[:, 7])


def test_what_is_added_to_the_stream_costs_k_rows_and_the_last_layer_is_free() -> None:
    shapes = family_of(MODEL).parameter_shapes(range(4))
    for layer in range(4):
        rows = WIDTH if layer == 3 else RANK
        assert shapes[f"layers.{layer}.attention.output.weight"] == (rows, WIDTH)
        assert shapes[f"layers.{layer}.feed_forward.down.weight"] == (rows, 56)
    inner = WIDTH * WIDTH + 2 * WIDTH * 24 + 2 * WIDTH * 56 + 2 * WIDTH
    outer = 3 * RANK * (WIDTH + 56) + WIDTH * (WIDTH + 56)
    ends = VOCABULARY * RANK + WIDTH + VOCABULARY * WIDTH
    assert sum(p.numel() for p in cut(MODEL, 1)[0].parameters()) == 4 * inner + outer + ends


def test_bf16_products_leave_the_coordinates_in_float32() -> None:
    first, last = cut(MODEL, 2)
    tokens = some_tokens(MODEL)
    with torch.autocast("cpu", torch.bfloat16):
        boundary = first(tokens)
        rough = last(boundary, tokens)
    assert boundary.dtype == torch.float32
    exact = last(first(tokens), tokens).detach().numpy()
    assert relative_difference(rough.detach().float().numpy(), exact) < 0.1


# --- trained by the product


def narrow_manifest(stages: int, activations: str = "recompute") -> Manifest:
    model = {"width": 32, "subspace": 6, "layers": 4, "heads": 4, "key_value_heads": 2, "feed_forward": 48}
    return small_manifest(
        model=model | {"context": 16},
        stages={"count": stages},
        schedule={"activations": activations},
        optimizer={"clip": 0.0},
    )


async def trained(manifest: Manifest, spans: list[str]) -> PlainRun:
    async with pipeline_of(manifest, spans) as pipeline:
        losses = [await train_step(pipeline, step, n) for n, step in enumerate(batches_for(manifest, STEPS))]
        return PlainRun(losses, [await c.copy_weights(stage) for c in pipeline for stage in c.span.stages])


def joined(run: PlainRun) -> dict[str, np.ndarray]:
    return {name: value for stage in run.weights for name, value in stage.items()}


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("spans", [["0"], ["0", "1"], ["0-2", "3"], ["0", "1", "2", "3"]])
def test_any_number_of_stages_trains_as_one_plain_loop_does(spans: list[str], activations: str) -> None:
    expected = run_plain_loop(narrow_manifest(1), batches_for(narrow_manifest(1), STEPS))
    assert expected.losses[-1] < expected.losses[0]
    count = int(spans[-1][-1]) + 1
    found = asyncio.run(trained(narrow_manifest(count, activations), spans))
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    plain, mine = joined(expected), joined(found)
    assert mine.keys() == plain.keys()
    assert max(relative_difference(mine[name], plain[name]) for name in plain) < 1e-5


def test_trained_output_matrices_stay_in_the_subspace_but_for_the_last_layers() -> None:
    manifest = narrow_manifest(2)
    basis, exported = fixed_tensors.derive_basis(manifest.seed, 32, 6), family_of(manifest.model).exported_tensors
    converters = {tensor.source: tensor.convert for tensor in exported(range(4), manifest.seed)}
    for name, values in joined(asyncio.run(trained(manifest, ["0", "1"]))).items():
        if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
            convert = converters[name]
            full = values if convert is None else convert(values)
            outside = relative_difference(basis @ (basis.T @ full), full)
            assert outside > 0.5 if name.startswith("layers.3.") else outside < 1e-6, name


def test_what_crosses_the_wire_is_k_numbers_for_each_token() -> None:
    async def boundary_bytes() -> tuple[int, int]:
        manifest = narrow_manifest(2)
        [[batch, *_]] = batches_for(manifest, 1)
        async with pipeline_of(manifest, ["0", "1"]) as (first, last):
            there = await first.forward(SpanWork(microbatch_id(0), 0, None, tokens_of(batch), "train"))
            back = (
                await last.run_last_stages(SpanWork(microbatch_id(0), 1, there, tokens_of(batch), "train"))
            ).gradient
            assert back is not None
            return len(there.data), len(back.data)

    assert asyncio.run(boundary_bytes()) == (2 * 16 * 6 * 4, 2 * 16 * 6 * 4)
