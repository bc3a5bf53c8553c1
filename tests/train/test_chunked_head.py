"""Head and loss chunk by chunk: the loss and the gradients of all logits at once, whose logits never exist at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agora_protocol.ids import MicrobatchId, Span
from agora_protocol.manifest_sections import ObjectiveSection
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from agora.codec.uncompressed import IGNORED
from agora.cost import activation_bytes
from agora.train.objectives import Head, MicrobatchLoss, TokenBatch, objective_of, row_log_probabilities
from agora.train.span_trainer import SpanTrainer
from agora.train.weight_versions import DecodedWork
from tests.train.support import small_manifest

ROWS, PLACES, WIDTH, IDS = 4, 21, 16, 97
AT_ONCE = 8  # tokens of a chunk
REFERENCES = (-30.0, -31.0, -20.0, -25.0)


class LargestLogits(TorchDispatchMode):
    """Counts for how many tokens any tensor has a value of each id; a transposed matrix of the head is none of them."""

    def __init__(self, ids: int) -> None:
        super().__init__()
        self._ids = ids
        self.tokens = 0

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if function is torch.ops.aten.t.default or not isinstance(tensor, Tensor) or tensor.ndim < 2:
                continue
            if tensor.shape[-1] == self._ids:
                self.tokens = max(self.tokens, tensor.numel() // self._ids)
        return result


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_bytes, "LOGITS_AT_ONCE", AT_ONCE * IDS)


def some_batch(supervised: float) -> TokenBatch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, IDS, (ROWS, PLACES + 1), generator=generator, dtype=torch.int32)
    kept = torch.rand(ROWS, PLACES, generator=generator) < supervised
    return TokenBatch(ids[:, :-1], torch.where(kept, ids[:, 1:], IGNORED), int(kept.sum()))


def make_head(kind: str) -> Head:
    """A final norm and a head of a kind: trained, frozen, one with LoRA, or one whose logits are capped."""
    torch.manual_seed(0)
    norm, head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, IDS, bias=False)
    layer: nn.Module = head
    if kind == "lora":
        config = LoraConfig(r=4, target_modules=["head"], init_lora_weights=False)
        layer = inject_adapter_in_model(config, nn.ModuleDict({"head": head})).get_submodule("head")
    if kind in ("lora", "frozen"):
        norm.requires_grad_(False)
        head.requires_grad_(False)

    def logits(hidden: Tensor) -> Tensor:
        uncapped: Tensor = layer(norm(hidden))
        return 5 * torch.tanh(uncapped / 5) if kind == "capped" else uncapped

    return Head(logits, nn.ModuleList([norm, layer]), IDS)


def uncut_loss(section: ObjectiveSection, head: Head, hidden: Tensor, batch: TokenBatch) -> Tensor:
    """In plain formulas of all logits at once."""
    logits = head.logits(hidden).float()
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten().long(), reduction="none", ignore_index=-1)
    if section.kind != "dpo":
        return losses.sum()
    gains = -losses.view(ROWS, PLACES).sum(1) - torch.tensor(REFERENCES)
    return -F.logsigmoid(section.beta * (gains[0::2] - gains[1::2])).sum() * 2 * PLACES


def losses_of(kind: str, head: Head, hidden: Tensor, batch: TokenBatch) -> MicrobatchLoss:
    section = ObjectiveSection.model_validate({"kind": kind})
    return objective_of(section).loss(head, hidden, batch, REFERENCES if kind == "dpo" else ())


def some_hidden() -> Tensor:
    return torch.randn(ROWS, PLACES, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("supervised", [1.0, 0.6, 0.05])
@pytest.mark.parametrize("kind", ["lm", "sft", "dpo"])
@pytest.mark.parametrize("of_head", ["trained", "frozen", "lora", "capped"])
def test_loss_and_gradients_are_those_of_all_logits_at_once(of_head: str, kind: str, supervised: float) -> None:
    head, hidden, batch = make_head(of_head), some_hidden(), some_batch(supervised)
    expected = uncut_loss(ObjectiveSection.model_validate({"kind": kind}), head, hidden, batch)
    inputs = [hidden, *head.trained]
    assert len(inputs) == (1 if of_head == "frozen" else 3)
    wanted = torch.autograd.grad(expected, inputs)
    with LargestLogits(IDS) as largest:
        loss, metrics = losses_of(kind, head, hidden, batch)
        computed = torch.autograd.grad(loss, inputs)
    assert 0 < largest.tokens <= AT_ONCE
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert [relative_error(*pair) < 1e-6 for pair in zip(computed, wanted, strict=True)] == [True] * len(inputs)
    if kind == "sft":
        right = head.logits(hidden).argmax(-1) == batch.targets
        assert metrics == (float(right.sum()),)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("kind", ["lm", "sft", "dpo"])
def test_a_microbatch_without_a_supervised_token_has_no_gradient(kind: str) -> None:
    head, hidden = make_head("trained"), some_hidden()
    loss, _ = losses_of(kind, head, hidden, some_batch(0.0))
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, [hidden, *head.trained]))


@pytest.mark.usefixtures("chunked")
def test_evaluations_and_references_compute_no_more_logits_at_once_and_no_gradients() -> None:
    head, hidden, batch = make_head("trained"), some_hidden(), some_batch(0.6)
    for kind in ("lm", "sft", "dpo"):
        with torch.no_grad(), LargestLogits(IDS) as largest:
            loss, _ = losses_of(kind, head, hidden, batch)
        assert not loss.requires_grad and largest.tokens == AT_ONCE
        expected = uncut_loss(ObjectiveSection.model_validate({"kind": kind}), head, hidden, batch)
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    with torch.no_grad(), LargestLogits(IDS) as largest:
        row_log_probabilities(head, hidden, batch)
    assert largest.tokens == AT_ONCE


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("kind", ["lm", "dpo"])
def test_under_autocast_the_products_are_in_bf16_and_the_losses_in_float32(kind: str) -> None:
    head, batch = make_head("trained"), some_batch(0.6)
    computed = []
    for dtype in (torch.bfloat16, None):
        hidden = some_hidden()
        with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
            loss, _ = losses_of(kind, head, hidden, batch)
        assert loss.dtype == torch.float32
        computed.append([loss.detach(), *torch.autograd.grad(loss, [hidden, *head.trained])])
    errors = [relative_error(*pair) for pair in zip(*computed, strict=True)]
    assert 0 < max(errors) < 0.02


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("kind", ["lm", "dpo"])
@pytest.mark.parametrize("supervised", [1.0, 0.6, 0.05])
def test_gradients_of_a_head_in_bf16_are_summed_in_float32_and_rounded_once(supervised: float, kind: str) -> None:
    batch, hidden = some_batch(supervised), some_hidden()
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        head = make_head("trained")
        matrices = [parameter for parameter in head.trained if parameter.dim() > 1]
        for matrix in matrices:
            matrix.data = matrix.data.bfloat16().to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, _ = losses_of(kind, head, hidden, batch)
        found[dtype] = torch.autograd.grad(loss, matrices)
    for rounded, exact in zip(found[torch.bfloat16], found[torch.float32], strict=True):
        assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, exact.bfloat16())


def test_only_several_chunks_of_preferences_go_through_the_head_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[int] = []

    def count(kind: str) -> int:
        tokens.clear()
        whole = make_head("trained")

        def logits(hidden: Tensor) -> Tensor:
            tokens.append(len(hidden))
            return whole.logits(hidden)

        loss, _ = losses_of(kind, Head(logits, whole.modules, IDS), some_hidden(), batch)
        torch.autograd.grad(loss, whole.trained)
        return sum(tokens)

    batch = some_batch(0.6)
    supervised = batch.supervised_tokens
    assert [count(kind) for kind in ("lm", "sft", "dpo")] == [supervised] * 3
    monkeypatch.setattr(activation_bytes, "LOGITS_AT_ONCE", AT_ONCE * IDS)
    assert [count(kind) for kind in ("lm", "sft", "dpo")] == [supervised, supervised, 2 * supervised]


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_trainer_takes_a_microbatch_through_the_last_stage_in_chunks(
    activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = small_manifest(schedule={"activations": activations})
    last, ids = manifest.stage_count - 1, manifest.model.vocabulary
    rows, places = manifest.schedule.microbatch, manifest.model.context
    sums: list[Tensor] = []
    for at_once in (rows * places, 3):
        monkeypatch.setattr(activation_bytes, "LOGITS_AT_ONCE", at_once * ids)
        trainer = SpanTrainer(manifest, Span(last, last), torch.device("cpu"), report=lambda event: None, in_flight=1)
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, ids, manifest.tokens_shape(), generator=generator)
        entry = torch.randn(manifest.boundary_shape(), generator=generator)
        batch = TokenBatch.from_wire(tokens, has_marks=False)
        with LargestLogits(ids) as largest:
            result = trainer.run_last_stages(DecodedWork(MicrobatchId(bytes(16)), last, entry, batch, "train"))
        assert largest.tokens == at_once and result.gradient is not None
        sums.append(
            torch.cat([result.gradient.flatten(), *(t.flatten() for t in trainer.stages[last].gradient_sum.tensors)])
        )
    assert relative_error(sums[1], sums[0]) < 1e-6
