"""What the product asks of a model family. Layers are numbered over the whole model; a stage is a range of them.

Knows: stages, tensors' names and shapes. Must not know: how a family computes, peers, files.
"""

from __future__ import annotations

import abc
import math
from typing import Any, Final

import torch

from agora.model.initial_weights import fill_initial_weights
from agora.model.stage_module import Stage
from agora.state.merged_model import ExportedTensor
from agora.state.model_card import ModelDescription

TRAINING_BYTES: Final = 16
"""Bytes of a trained parameter: weight, gradient and two moments, float32."""


class Family(abc.ABC):
    """One model family with the sizes of one manifest: builds, counts, exports and describes its stages.

    How wide a boundary is, the manifest's ModelSection says, since every peer must know it without torch.
    """

    @abc.abstractmethod
    def make_stage(self, layers: range) -> Stage:
        """Returns the module of the stage that holds `layers`, on the meta device: it computes no values."""

    @abc.abstractmethod
    def memory_bytes(self, layers: range, tokens: int) -> int:
        """Returns the least memory that training `layers` takes, with microbatches of `tokens` tokens."""

    @abc.abstractmethod
    def exported_tensors(self, layers: range, seed: int) -> list[ExportedTensor]:
        """Returns every tensor of the stage that holds `layers` as a Hugging Face folder has it. seed: the run's."""

    @abc.abstractmethod
    def config_files(self, dtype: str, end_of_text: int | None) -> dict[str, dict[str, Any]]:
        """Returns the JSON files beside the tensors of a Hugging Face folder, by name.

        dtype: "float32" or "bfloat16". end_of_text: the id that ends a document; None where there is none.
        """

    @abc.abstractmethod
    def describe(self) -> ModelDescription:
        """Returns the words of a model card that only the family knows."""

    def build_stage(self, layers: range, seed: int) -> Stage:
        """Returns the stage that holds `layers` with its initial weights, float32 on the CPU.

        A tensor's values depend on the run's seed and its full name only: every cut of the model, on every peer, starts
        from the same weights. Raises DerivationError if this machine would give its fixed tensors other values.
        """
        with torch.device("meta"):
            stage = self.make_stage(layers)
        stage.to_empty(device="cpu")
        stage.fill_buffers(seed)
        fill_initial_weights(stage, seed)
        return stage

    def parameter_shapes(self, layers: range) -> dict[str, tuple[int, ...]]:
        """Returns full name -> shape of every parameter of a stage, in the stage's order, without allocating any."""
        with torch.device("meta"):
            return {name: tuple(p.shape) for name, p in self.make_stage(layers).named_parameters()}

    def parameter_count(self, layers: range) -> int:
        """Returns how many parameters the stage that holds `layers` has."""
        return sum(math.prod(shape) for shape in self.parameter_shapes(layers).values())
