"""What really crosses a boundary: a small model trained for a while in two stages, in one process.

Knows: the trainer and the corpus. Must not know: codecs, networks, clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from agora_protocol.ids import MicrobatchId, PeerId, Span
from agora_protocol.manifest import Manifest
from torch import Tensor

from agora.data.corpus import open_corpus
from agora.data.sampling import Sampler, sample_id
from agora.data.tokenizer import ByteTokenizer
from agora.train.span import SpanTrainer

ORIGIN = PeerId("samples")


@dataclass(frozen=True, slots=True)
class Samples:
    """Of the last microbatches, each float32 [b, s, k]: what went forward, and the gradients that came back."""

    forward: list[Tensor]
    backward: list[Tensor]


def boundary_samples(manifest: Manifest, steps: int, keep: int, folder: Path) -> Samples:
    """Trains the two stages of `manifest` for `steps` steps of one microbatch; the last `keep` boundaries."""
    corpus = open_corpus(manifest.data.corpus, ByteTokenizer(), cache_dir=folder)
    sampler = Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed)
    first, last = (_stage(manifest, number) for number in range(2))
    found = Samples([], [])
    for step in range(steps):
        begin = step * manifest.schedule.microbatch
        ids = [sample_id(ORIGIN, counter) for counter in range(begin, begin + manifest.schedule.microbatch)]
        tokens = torch.from_numpy(sampler.batch(ids)).long()
        boundary, gradient = _microbatch(first, last, MicrobatchId(step.to_bytes(16, "big")), tokens)
        if step >= steps - keep:
            found.forward.append(boundary)
            found.backward.append(gradient)
    return found


def _stage(manifest: Manifest, number: int) -> SpanTrainer:
    trainer = SpanTrainer(
        manifest, Span(number, number), torch.device("cpu"), report=lambda event: None, bf16=False, in_flight=1
    )
    trainer.step_tokens = lambda stage: manifest.tokens_per_microbatch
    return trainer


def _microbatch(first: SpanTrainer, last: SpanTrainer, name: MicrobatchId, tokens: Tensor) -> tuple[Tensor, Tensor]:
    boundary, _ = first.forward(name, 0, tokens[:, :-1], tokens, train=True)
    _, _, gradient = last.finish(name, 1, boundary.clone(), tokens, train=True)
    if gradient is None:
        raise ValueError("stage 1 is entered by a boundary, and has its gradient")
    first.backward(name, gradient)
    for trainer in (first, last):
        trainer.take_due_steps()
    return boundary, gradient
