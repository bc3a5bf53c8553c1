"""A second family, defined here alone, is cut, trained, checked for memory, exported and described by the product."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from agora_protocol.errors import ManifestError, OutOfMemory
from agora_protocol.identity import Identity
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.manifest_model import MODEL_SECTIONS, ModelSection
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor, nn

from agora.cli import export_command
from agora.core.span_work import SpanWork
from agora.cost.run_cost import MemoryNeed
from agora.model import FAMILIES, Family, RunLayer, StageModule, family_of, keep_graph
from agora.node import paths, run_files
from agora.node.limits.memory import MemoryBudget, check_memory
from agora.state.checkpoint import write_checkpoint
from agora.state.export_tensors import ExportedTensor
from agora.state.layout import StageState
from agora.state.model_card import ModelDescription
from agora.train.optimizer import with_moments
from agora.train.weight_versions import StageWeights
from tests.train.support import batches_for, microbatch_id, pipeline_of, tokens_of, train_step

TOML = """
name = "second"
[model]
family = "linear"
layers = 3
width = 6
context = 8
vocabulary = 256
[boundary]
codec = "float32"
[schedule]
microbatch = 2
[optimizer]
target_tokens = 48
warmup_steps = 0
learning_rate = 0.1
"""


class LinearSection(ModelSection):
    """A model of linear layers."""

    family: Literal["linear"] = Field(default="linear", description="model family")
    layers: int = Field(default=2, ge=1, description="linear layers in all")
    width: int = Field(default=4, ge=1, le=64, description="values of each token between layers")
    context: int = Field(default=8, ge=1, description="tokens per sequence")
    vocabulary: int = Field(default=256, ge=2, description="token ids of the model")

    @property
    def boundary_width(self) -> int:
        return self.width

    def check_values(self) -> str | None:
        return "[model] width 13 is unlucky; use 14." if self.width == 13 else None


class LinearStage(StageModule):
    """An embedding, linear layers, and a head without bias."""

    def __init__(self, model: LinearSection, layers: range) -> None:
        super().__init__(layers, is_first=layers.start == 0, is_last=layers.stop == model.layers)
        self.layers = nn.ModuleDict({str(layer): nn.Linear(model.width, model.width) for layer in layers})
        self.ends = nn.ModuleDict()
        if self.is_first:
            self.ends["embedding"] = nn.Embedding(model.vocabulary, model.width)
        if self.is_last:
            self.ends["head"] = nn.Linear(model.width, model.vocabulary, bias=False)

    def run_layers(
        self,
        hidden: Tensor,
        tokens: Tensor | None = None,
        segments: Tensor | None = None,
        run_layer: RunLayer = keep_graph,
    ) -> Tensor:
        if self.is_first:
            hidden = self.ends["embedding"](hidden.clamp(min=0))
        for layer in self.layers.values():
            hidden = hidden + run_layer(layer, layer, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.ends["head"](hidden)
        return logits

    def head_modules(self) -> nn.ModuleList:
        return nn.ModuleList([self.ends["head"]])

    def initial_std(self, name: str) -> float | None:
        return 0.1

    def is_hidden_matrix(self, name: str) -> bool:
        return name.startswith("layers.") and name.endswith("weight")


class LinearFamily(Family):
    """What the product asks of the family."""

    def __init__(self, model: LinearSection) -> None:
        self._model = model

    def make_meta_stage(self, layers: range) -> StageModule:
        return LinearStage(self._model, layers)

    def min_memory(
        self, manifest: Manifest, span: Span, *, in_16_bits: bool = False, state_in_host: bool = False
    ) -> MemoryNeed:
        return MemoryNeed(2.0**30 * len(manifest.layers_in(span)))

    def exported_tensors(self, layers: range, seed: int) -> list[ExportedTensor]:
        return [
            ExportedTensor(name, f"linear.{name}", shape[::-1], shape, np.transpose)
            for name, shape in self.parameter_shapes(layers).items()
        ]

    def config_files(
        self, dtype: str, end_of_text: int | None, turn_ends: Sequence[int] = ()
    ) -> dict[str, dict[str, Any]]:
        return {"config.json": {"model_type": "linear", "dtype": dtype, "eos": end_of_text}}

    def describe(self) -> ModelDescription:
        return ModelDescription("A stack of lines", f"{self._model.layers} lines of {self._model.width}")


@pytest.fixture(autouse=True)
def second_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL_SECTIONS, "linear", LinearSection)
    monkeypatch.setitem(FAMILIES, "linear", (__name__, "LinearFamily"))


@pytest.fixture
def manifest() -> Manifest:
    return Manifest.from_toml(TOML)


def test_its_section_is_read_written_hashed_and_explained_like_any_other(manifest: Manifest) -> None:
    assert isinstance(manifest.model, LinearSection)
    assert Manifest.from_toml(manifest.to_toml()) == manifest and b"linear" in manifest.canonical()
    signed = SignedManifest.sign(manifest, Identity.generate())
    assert SignedManifest.from_bytes(signed.to_bytes()) == signed
    assert manifest.with_values(model={"width": 7}).model.boundary_width == 7
    other = manifest.with_values(model={"family": "subspace"}, optimizer={"target_tokens": 2560})
    assert (other.model.family, other.model.boundary_width) == ("subspace", 128)
    for line, says in (
        ("width = 65", r"\[model\] width 65 must be less than or equal to 64; .* for the default 4"),
        ("width = 13", "width 13 is unlucky"),
        ("widht = 5", r"\[model\] has no key 'widht'; did you mean 'width'"),
        ("heads = 5", r"\[model\] has no key 'heads'; use one of family, layers, width"),
        ('family = "liner"', "family 'liner' is unknown; did you mean 'linear'"),
    ):
        key = line.split(" ")[0]
        kept = [other for other in TOML.splitlines() if not other.startswith(f"{key} ")]
        with pytest.raises(ManifestError, match=says):
            Manifest.from_toml("\n".join(kept).replace("[model]", f"[model]\n{line}"))


def test_its_boundaries_cross_and_its_stages_learn(manifest: Manifest) -> None:
    assert manifest.boundary_shape() == (2, 8, 6)
    shapes = family_of(manifest.model).parameter_shapes(manifest.layers_of(1))
    assert shapes["ends.head.weight"] == (256, 6) and len(shapes) == 5

    async def losses() -> list[float]:
        async with pipeline_of(manifest, ["0", "1"]) as pipeline:
            [[batch, *_], *_] = steps = batches_for(manifest, 12)
            boundary = await pipeline[0].forward(SpanWork(microbatch_id(99), 0, None, tokens_of(batch), "evaluate"))
            assert boundary.shape == (2, 8, 6)
            return [await train_step(pipeline, step, number) for number, step in enumerate(steps)]

    trained = asyncio.run(losses())
    assert trained[-1] < trained[0] - 0.5


def test_its_memory_decides_whether_a_span_fits(manifest: Manifest) -> None:
    with pytest.raises(OutOfMemory, match=r"Stages 0-1 need 3,328 MiB of memory and 3,072 MiB may be used"):
        check_memory(manifest, Span(0, 1), MemoryBudget(3 * 2**30))
    note = check_memory(manifest, Span(1, 1), MemoryBudget(3 * 2**30))
    assert note == "2,304 MiB of 3,072 MiB memory needed"


def test_its_export_has_its_own_tensors_config_and_card(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(paths.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path / "sockets"))
    signed, home = SignedManifest.sign(manifest, Identity.generate()), paths.home_at()
    run_files.remember_manifest(home, signed)
    exact: dict[str, Tensor] = {}
    for stage in range(2):
        module = family_of(manifest.model).build_stage(manifest.layers_of(stage), manifest.seed)
        exact |= {f"linear.{name}": p.detach().clone() for name, p in module.named_parameters()}
        layout = with_moments(manifest.optimizer, StageWeights(module, torch.device("cpu")).layout)
        named = {name: p.detach().numpy() for name, p in module.named_parameters()}
        arrays = {moment.name: layout.flatten(named) for moment in layout.moments}
        state = StageState(stage, 5, 5, 0, layout, 2 * layout.flatten(named), arrays)
        write_checkpoint(home.checkpoints(signed.run_id), signed.run_id, state, keep=1)
    out = tmp_path / "out"
    export_command.run("second", out, as_json=True)
    exported = load_file(out / "model-00001-of-00001.safetensors")
    assert exported.keys() == exact.keys() and all(torch.equal(exported[name], exact[name].t()) for name in exact)
    assert json.loads((out / "config.json").read_text()) == {"model_type": "linear", "dtype": "float32", "eos": 0}
    card = (out / "README.md").read_text()
    count = sum(tensor.numel() for tensor in exact.values())
    assert f"A stack of lines of {count:,} parameters" in card and "| shape | 3 lines of 6 |" in card
    assert not (out / "generation_config.json").exists()
