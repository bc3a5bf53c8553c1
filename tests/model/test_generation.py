"""Claims about drawing ids from a model: what it sees, what is drawn, and that a seed repeats it."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from agora_protocol.manifest import Manifest, preset
from torch import Tensor, nn

from agora.model import RunLayer, StageModule, family_of, keep_graph
from agora.model.generation import continue_ids

MODEL = {"width": 32, "subspace": 16, "layers": 3, "heads": 4, "key_value_heads": 2, "feed_forward": 48, "context": 16}


class Counting(StageModule):
    """Predicts that the id after i is i + 1, or with odds of e^-1 to 1 that it is i + 2; remembers what it saw."""

    def __init__(self) -> None:
        super().__init__(range(1), is_first=True, is_last=True)
        self.seen: list[list[int]] = []

    def run_layers(
        self,
        hidden: Tensor,
        tokens: Tensor | None = None,
        segments: Tensor | None = None,
        run_layer: RunLayer = keep_graph,
    ) -> Tensor:
        self.seen.append(hidden[0].tolist())
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.full((*hidden.shape, 50), -100.0)
        logits.scatter_(2, (hidden + 2)[..., None] % 50, -1.0)
        return logits.scatter_(2, (hidden + 1)[..., None] % 50, 0.0)

    def head_modules(self) -> nn.ModuleList:
        return nn.ModuleList()

    def initial_std(self, name: str) -> float | None:
        return None

    def is_hidden_matrix(self, name: str) -> bool:
        return False


def test_the_model_sees_what_was_drawn_but_no_more_than_its_context() -> None:
    model = Counting()
    drawn = list(islice(continue_ids(model, [3, 4], context=4, seed=0, temperature=1e-3), 5))
    assert drawn == [5, 6, 7, 8, 9]
    assert model.seen == [[3, 4], [3, 4, 5], [3, 4, 5, 6], [4, 5, 6, 7], [5, 6, 7, 8]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_ids_are_drawn_with_the_odds_that_the_temperature_gives(temperature: float) -> None:
    drawn = [next(continue_ids(Counting(), [7], context=4, seed=seed, temperature=temperature)) for seed in range(2000)]
    odds = np.exp(-1 / temperature)
    assert set(drawn) == {8, 9}
    assert np.mean(np.array(drawn) == 9) == pytest.approx(odds / (1 + odds), abs=0.04)


def test_a_seed_repeats_its_ids_and_another_draws_others() -> None:
    manifest = preset("tiny", model=MODEL)
    model = family_of(manifest.model).build_stage(range(3), manifest.seed)
    drawn = [list(islice(continue_ids(model, [0], context=16, seed=seed), 40)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(0 <= token < manifest.model.vocabulary for token in drawn[0])


@torch.no_grad()
def test_a_whole_model_loaded_from_the_stages_tensors_has_their_logits() -> None:
    manifest: Manifest = preset("tiny", model=MODEL, stages={"count": 3})
    family, ids = family_of(manifest.model), torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))
    hidden, weights = ids, {}
    for number in range(3):
        stage = family.build_stage(manifest.layers_of(number), manifest.seed)
        for parameter in stage.parameters():
            parameter.mul_(1.5)
        weights |= {name: parameter.detach().numpy() for name, parameter in stage.named_parameters()}
        hidden = stage(hidden, ids)
    whole = family.load_stage(range(3), manifest.seed, weights)
    torch.testing.assert_close(whole(ids, ids), hidden)
    with pytest.raises(KeyError, match=r"head\.weight"):
        family.load_stage(range(3), manifest.seed, {name: weights[name] for name in weights if name != "head.weight"})
    wide = {**weights, "head.weight": weights["head.weight"][:1]}
    with pytest.raises(RuntimeError, match=r"head\.weight has the shape"):
        family.load_stage(range(3), manifest.seed, wide)
