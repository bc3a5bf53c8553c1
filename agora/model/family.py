"""The interface of a model family and of its stages, and the initial weights of stages.

Layers are numbered over the whole model; a stage is a range of them.
"""

from __future__ import annotations

import abc
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest
from numpy.typing import NDArray
from torch import Tensor, nn

from agora.cost.manifest_cost import min_memory
from agora.cost.run_cost import MemoryNeed
from agora.state.export_tensors import ExportedTensor, ReadTrained, TensorBlocks
from agora.state.model_card import ModelDescription

# Called with a layer, the function that computes the layer, and the layer's input; returns the output. It decides what
# autograd keeps for the backward: the layer's whole graph, or only the layer's input (recomputation).
RunLayer = Callable[[nn.Module, Callable[[Tensor], Tensor], Tensor], Tensor]
PIECES, PIECE_BITS = 8, 15  # an initial value is the sum of PIECES uniform integers of PIECE_BITS bits
CHUNK = 1 << 22  # values drawn at a time


def keep_graph(layer: nn.Module, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """The default RunLayer: autograd keeps the whole graph."""
    return compute(hidden)


class StageModule(nn.Module, abc.ABC):
    """Base class of stages: consecutive layers of a model.

    The first stage also has the embedding, the last one the final norm and the head. Parameters carry their full names
    in the model ("layers.7.attention.query.weight"), however the model is cut into stages. A family makes its stages on
    the meta device: a constructor computes no values.
    """

    def __init__(self, layer_range: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.layer_range = layer_range
        self.is_first = is_first
        self.is_last = is_last

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor | None = None,
        segments: Tensor | None = None,
        run_layer: RunLayer = keep_graph,
    ) -> Tensor:
        """As run_layers, but the last stage returns the logits [b, s, vocabulary] of all tokens at once."""
        hidden = self.run_layers(hidden, tokens, segments, run_layer)
        return self.logits(hidden) if self.is_last else hidden

    @abc.abstractmethod
    def run_layers(
        self,
        hidden: Tensor,
        tokens: Tensor | None = None,
        segments: Tensor | None = None,
        run_layer: RunLayer = keep_graph,
    ) -> Tensor:
        """Returns the boundary [b, s, k] that leaves the layers, from the boundary `hidden` [b, s, k] that enters them.

        After the model's last layer it is the hidden state [b, s, d] that `logits` takes. k: columns of a boundary.

        hidden: for the first stage, the token ids [b, s]. tokens, segments: as in TokenBatch; a token attends to its
        own sequence only, in which positions count from 0. Only families whose section has `can_learn_samples` true
        take segments. run_layer: called for each decoder layer, with a function of the hidden state alone, in which
        only that state and the layer's parameters have gradients. To be compiled, it must be a functools.partial with
        the layer as its function or as one of its positional arguments.
        """

    @abc.abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., vocabulary] from the last layer's hidden state [..., d]: final norm and head.

        Only for the last stage; so for head_modules. Each token's logits depend on its own hidden state alone.
        """

    @abc.abstractmethod
    def head_modules(self) -> nn.ModuleList:
        """Returns the modules whose parameters `logits` uses."""

    def keep_reference(self) -> None:
        """Keeps what `as_reference` needs of the weights as they are now, before any training; call it once."""

    def as_reference(self) -> AbstractContextManager[None]:
        """Context manager: inside it, forwards without gradients compute the model as it was before any training.

        Call keep_reference before. Only for models whose section has `has_reference` true; so for `merged_tensors`.
        """
        raise LookupError(f"{type(self).__name__} keeps no model as it began")

    def allocate(self) -> None:
        """Moves everything from the meta device to the CPU, in place, with undefined values."""
        self.to_empty(device="cpu")

    def fill_buffers(self, seed: int) -> None:
        """Sets the stage's buffers, in place, once for all. seed: the run's."""

    @torch.no_grad()
    def fill_at_random(self, generator: torch.Generator) -> None:
        """Sets all weights, in place, to values without meaning: to measure how fast the stage is."""
        for _, parameter in self.trained_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)

    def initial_std(self, name: str) -> float | None:
        """None: all of the parameter's initial values are 1. A family overrides this or Family.fill_trained."""
        raise LookupError(f"{type(self).__name__} does not say how {name} begins")

    @abc.abstractmethod
    def is_hidden_matrix(self, name: str) -> bool:
        """Returns whether the parameter of this full name is a matrix whose updates the optimizer muon orthogonalises.

        Not an embedding or a head, one side of which is the vocabulary.
        """

    def hidden_matrices(self) -> list[str]:
        return [name for name, _ in self.trained_parameters() if self.is_hidden_matrix(name)]

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        # The others are frozen and never change.
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)


class Family(abc.ABC):
    """Base class of model families: builds the stages of one manifest's model, and says how they are exported."""

    def check_machine(self, base_model: Path | None) -> None:  # noqa: B027 - most families need nothing
        """Raises LocalError if this machine lacks a package or a folder that this family's stages need.

        Called before a peer claims stages; may import packages, which takes seconds. base_model: the folder with the
        base model's files, or None; so in all methods.
        """

    @abc.abstractmethod
    def make_meta_stage(self, layers: range) -> StageModule:
        """The caller must have set the meta device: no memory is allocated."""

    def min_memory(
        self, manifest: Manifest, span: Span, *, in_16_bits: bool = False, state_in_host: bool = False
    ) -> MemoryNeed:
        """Returns an estimate of the least memory that training `span` takes.

        in_16_bits: layers multiply in bf16 or fp16, else in float32. state_in_host: the optimizer's state is in host
        memory; else all is on the device.
        """
        return min_memory(manifest, span, in_16_bits=in_16_bits, state_in_host=state_in_host)

    @abc.abstractmethod
    def exported_tensors(self, layers: range, seed: int) -> list[ExportedTensor]:
        """Returns the trained tensors of `layers` as in an exported Hugging Face model.

        seed: the run's, from which fixed tensors are derived.
        """

    @abc.abstractmethod
    def config_files(
        self, dtype: str, end_of_text: int | None, turn_ends: Sequence[int] = ()
    ) -> dict[str, dict[str, Any]]:
        """Returns the JSON files of an exported Hugging Face model or adapter: file name -> content.

        dtype: "float32" or "bfloat16". end_of_text: the id that ends a document. turn_ends: the ids with which the run
        learnt to end an answer; generation should stop at them, too.
        """

    def merged_tensors(self, base_model: Path, read_trained: ReadTrained) -> list[TensorBlocks]:
        """Returns the tensors of a whole Hugging Face model: those of the base model, merged with what was trained.

        The values are computed, and read_trained is called, block by block when they are read. Raises LocalError unless
        the files are those of the run.
        """
        raise LookupError(f"{type(self).__name__} trains nothing beside a base model")

    def merged_config_files(
        self, base_model: Path, dtype: str, turn_ends: Sequence[int] = ()
    ) -> dict[str, dict[str, Any]]:
        """As config_files, for the model of merged_tensors."""
        raise LookupError(f"{type(self).__name__} trains nothing beside a base model")

    @abc.abstractmethod
    def describe(self) -> ModelDescription:
        """For the model card."""

    @torch.no_grad()
    def build_stage(self, layers: range, seed: int, base_model: Path | None = None) -> StageModule:
        """Builds the stage of `layers` with its initial weights on the CPU, the same on every peer.

        Trained parameters are float32. seed: the run's. Raises LocalError when this machine cannot make or read the
        weights.
        """
        stage = self._allocate_stage(layers, seed)
        self.fill_frozen(stage, base_model)
        self.fill_trained(stage, seed, base_model)
        return stage

    @torch.no_grad()
    def build_empty_stage(self, layers: range, seed: int, base_model: Path | None = None) -> StageModule:
        """As build_stage, but the trained parameters are on the meta device: a state that is fetched replaces them all.

        Drawing them takes 0.1 s for each million.
        """
        stage = self._allocate_stage(layers, seed, trained=False)
        self.fill_frozen(stage, base_model)
        return stage

    def fill_trained(self, stage: StageModule, seed: int, base_model: Path | None) -> None:
        """Sets the trained parameters, in place, to their initial values, under torch.no_grad.

        An override raises LocalError when this machine cannot make or read the values; so for fill_frozen.
        """
        for name, parameter in stage.trained_parameters():
            if (std := stage.initial_std(name)) is None:
                parameter.fill_(1.0)
            else:
                parameter.copy_(initial_values(seed, name, parameter.shape, std))

    @torch.no_grad()
    def load_stage(
        self, layers: range, seed: int, weights: Mapping[str, NDArray[np.float32]], base_model: Path | None = None
    ) -> StageModule:
        """Builds the stage of `layers` on the CPU with copies of these trained weights, float32 by full name.

        Raises LocalError when this machine cannot make the frozen weights or the buffers, KeyError for a missing
        tensor, RuntimeError for a tensor of another shape than its parameter's.
        """
        stage = self._allocate_stage(layers, seed)
        self.fill_frozen(stage, base_model)
        for name, parameter in stage.trained_parameters():
            if weights[name].shape != tuple(parameter.shape):  # copy_ would broadcast it
                raise RuntimeError(f"{name} has the shape {weights[name].shape}, not {tuple(parameter.shape)}")
            parameter.copy_(torch.from_numpy(weights[name]))
        return stage

    def fill_frozen(self, stage: StageModule, base_model: Path | None) -> None:  # noqa: B027 - most families have none
        """Sets the frozen parameters, in place, to their values, under torch.no_grad."""

    def _allocate_stage(self, layers: range, seed: int, *, trained: bool = True) -> StageModule:
        # trained: False: the trained parameters stay on the meta device.
        with torch.device("meta"):
            stage = self.make_meta_stage(layers)
        left_out = (
            {} if trained else {parameter: names_of(stage, parameter) for _, parameter in stage.trained_parameters()}
        )
        for names in left_out.values():
            set_parameter(stage, names, None)
        stage.allocate()
        for parameter, names in left_out.items():
            set_parameter(stage, names, parameter)
        stage.fill_buffers(seed)
        return stage

    def parameter_shapes(self, layers: range) -> dict[str, tuple[int, ...]]:
        """Returns full name -> shape of every trained parameter, in the stage's order; needs no memory or files."""
        with torch.device("meta"):
            return {name: tuple(p.shape) for name, p in self.make_meta_stage(layers).trained_parameters()}

    def hidden_matrices(self, layers: range) -> list[str]:
        with torch.device("meta"):
            return self.make_meta_stage(layers).hidden_matrices()

    def parameter_count(self, layers: range) -> int:
        return sum(math.prod(shape) for shape in self.parameter_shapes(layers).values())


def names_of(stage: nn.Module, parameter: nn.Parameter) -> list[str]:
    """Returns the full names of a parameter: several if modules share it, as an embedding and a head that are tied."""
    return [name for name, other in stage.named_parameters(remove_duplicate=False) if other is parameter]


def set_parameter(stage: nn.Module, names: Iterable[str], parameter: nn.Parameter | None) -> None:
    """Puts `parameter` in place of the one of these full `names`."""
    for name in names:
        owner, _, own_name = name.rpartition(".")
        stage.get_submodule(owner).register_parameter(own_name, parameter)


def initial_values(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """Draws the named tensor's initial values, float32 [shape] on the CPU: nearly normal, mean 0, deviation `std`.

    Each tensor has its own random generator, seeded by `seed` and `name`, so a peer draws only the tensors that it
    holds. A value is a scaled sum of eight 15-bit uniform integers, at most 4.9 std from 0, so that every CPU gives the
    same bits (torch's normal_ and trunc_normal_ do not).
    """
    digest = hashlib.sha256(f"agora initial weights 1\0{seed}\0{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    flat = torch.empty(math.prod(shape))
    centre = PIECES * (2**PIECE_BITS - 1) / 2
    scale = std / math.sqrt(PIECES * (4**PIECE_BITS - 1) / 12)
    for chunk in torch.split(flat, CHUNK):
        sums = torch.zeros(len(chunk), dtype=torch.int64)
        for _ in range(PIECES // 4):  # four integers from each 63-bit draw
            bits = torch.empty(len(chunk), dtype=torch.int64).random_(generator=generator)
            for shift in range(0, 4 * PIECE_BITS, PIECE_BITS):
                sums += (bits >> shift) & (2**PIECE_BITS - 1)
        chunk.copy_((sums.double() - centre) * scale)
    return flat.view(shape)
