"""Continues token ids with a whole model: each next id is drawn from what the model predicts.

Knows: one stage that is the whole model. Must not know: text, files, peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from agora.model.family import Stage


def continue_ids(
    model: Stage, prompt: Sequence[int], *, context: int, seed: int, temperature: float = 0.8
) -> Iterator[int]:
    """Yields token ids that continue `prompt`, without an end: the caller takes as many as it wants.

    model: first and last stage in one. prompt: at least one id. context: how many of the last ids the model sees. Each
    id is drawn from softmax(logits / temperature); the same seed draws the same ids on the same machine.
    """
    ids, generator = list(prompt), torch.Generator().manual_seed(seed)
    while True:
        seen = torch.tensor([ids[-context:]])
        with torch.no_grad():
            logits = model(seen, seen)[0, -1]
        probabilities = torch.softmax(logits.double() / temperature, dim=0)
        ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        yield ids[-1]
