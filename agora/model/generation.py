"""Continues token ids with a whole model: each next id is drawn from what the model predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from agora.model.family import StageModule


def continue_ids(
    model: StageModule, prompt: Sequence[int], *, context: int, seed: int, temperature: float = 0.8
) -> Iterator[int]:
    """Yields token ids that continue `prompt`, endlessly: the caller takes as many as it wants, and stops at end ids.

    model: one stage that is the whole model. prompt: at least one id. context: how many of the last ids the model sees,
    at most. Each id is drawn from softmax(logits / temperature), with temperature above 0; the same seed draws the same
    ids on the same machine. Nothing is cached: each id costs a forward over the whole window.
    """
    ids = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    while True:
        window = torch.tensor([ids[-context:]])
        with torch.no_grad():
            logits = model(window, window)[0, -1]
        probabilities = torch.softmax(logits.double() / temperature, dim=0)
        ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        yield ids[-1]
