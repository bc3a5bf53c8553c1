"""A stage of a Hugging Face decoder: transformers' own layers, with the embedding before and the head after them.

Parameters have their Hugging Face names, LoRA matrices those of peft. Rotary positions and attention masks are computed
in every forward from the lengths of the sequences, so that only the residual stream crosses a boundary. With LoRA,
frozen_layers decides the format of the frozen weights. Only LoRA's dropout depends on train and eval mode. Shapes: b
rows, s positions, d width.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import torch
from agora_protocol.errors import ManifestError
from agora_protocol.manifest_model import HfSection
from torch import Tensor, nn

from agora.core.optional_packages import PackageMissing
from agora.core.terminal_text import one_line
from agora.model.family import RunLayer, StageModule, keep_graph
from agora.tuning.adapters.frozen_layers import FrozenAs, allocate, freeze, load_parameter
from agora.tuning.adapters.frozen_linear import FrozenLinear
from agora.tuning.adapters.lora import adapters_as_kept, adapters_off, inject_lora, keep_adapters, lora_targets
from agora.tuning.base.hf_architecture import ConfigRefused, architecture_of
from agora.tuning.packed_attention import PackedSequences, pack, varlen_kernel, within

HEAD: Final = "lm_head"
INSIDE_LORA: Final = ".base_layer."  # what peft inserts into the name of a parameter of a layer that has LoRA


class HfStage(StageModule):
    """A stage of the family `hf`: transformers' decoder layers. It has no values until HfFamily fills it from files.

    With LoRA, only the LoRA matrices are trained, and all other parameters are frozen.
    """

    def __init__(self, model: HfSection, layer_range: range) -> None:
        """Makes the modules of `layer_range`, and with LoRA freezes them and adds its matrices.

        Raises PackageMissing without a package that it needs, ManifestError for a config or LoRA target that it
        refuses.
        """
        super().__init__(layer_range, is_first=layer_range.start == 0, is_last=layer_range.stop == model.layers)
        self._architecture = architecture_of(model)
        self._begins_with_adapter = bool(model.adapter_hash)
        self._frozen_as: FrozenAs | None = model.frozen_as if model.trained == "lora" else None
        try:
            self._config = self._architecture.make_config(model)
            self.add_module(self._architecture.root, self._make_body())
            self._rotary = self._make_rotary()
            self._windows = {index: self._architecture.window_of(self._config, index) for index in layer_range}
        except (PackageMissing, MemoryError):
            raise
        except ConfigRefused as error:
            raise ManifestError(
                f"[model] config is not the model that transformers makes of it: {error}; correct that key of "
                "config.json, or choose another model."
            ) from error
        except Exception as error:  # transformers raises many kinds for a config that its classes cannot use
            reason = one_line(str(error), 160)
            raise ManifestError(
                f"[model] config is not one that transformers can build ({reason}); the run needs a manifest of a "
                "config.json that AutoModelForCausalLM loads."
            ) from error
        if self.is_last:
            self.add_module(HEAD, nn.Linear(model.width, model.vocabulary, bias=False))
        if self._frozen_as is not None:
            self._add_lora(model, self._frozen_as)

    def _add_lora(self, model: HfSection, frozen_as: FrozenAs) -> None:
        names = self._architecture
        targets = lora_targets(model, names.linears)
        layers = self.get_submodule(f"{names.root}.{names.layers}")
        freeze(self, layers, frozen_as)
        inject_lora(layers, model, targets, is_transposed=names.is_transposed and frozen_as == "float32")

    def _make_body(self) -> nn.Module:
        names = self._architecture
        config = self._config
        body = nn.Module()
        if self.is_first:
            padding = config.pad_token_id if names.has_rotary else None  # as in transformers, its row is not trained
            body.add_module(names.embedding, _embedding(config.vocab_size, config.hidden_size, padding))
            if names.positions:
                rows = _embedding(config.max_position_embeddings, config.hidden_size, None)
                body.add_module(names.positions, rows)
        layer = names.load_class(names.layer_class)
        layers = {str(index): layer(config, layer_idx=index) for index in self.layer_range}
        body.add_module(names.layers, nn.ModuleDict(layers))
        if self.is_last:
            norm = names.load_class(names.norm_class) if names.norm_class else nn.LayerNorm
            body.add_module(names.norm, norm(config.hidden_size, eps=getattr(config, names.epsilon)))
        return body

    def _make_rotary(self) -> nn.Module | None:
        if not self._architecture.has_rotary:
            return None
        rotary: nn.Module = self._architecture.load_class("RotaryEmbedding")(self._config)
        self._require_whole_heads_rotated(rotary)
        return rotary

    def _require_whole_heads_rotated(self, rotary: nn.Module) -> None:
        # These layers rotate all values of a head; transformers' own fail in their first forward.
        config = self._config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for name, frequencies in rotary.named_buffers():
            if name.endswith("inv_freq") and 2 * len(frequencies) != size:
                raise ConfigRefused(f"partial_rotary_factor turns {2 * len(frequencies)} of a head's {size} values")

    def run_layers(
        self,
        hidden: Tensor,
        tokens: Tensor | None = None,
        segments: Tensor | None = None,
        run_layer: RunLayer = keep_graph,
    ) -> Tensor:
        body = self.get_submodule(self._architecture.root)
        positions = token_positions(hidden, segments)
        if self.is_first:
            hidden = self._embed(body, hidden, positions)
        packed = self._pack(hidden, segments)
        masks = {window: self._mask(hidden, window, segments, packed) for window in set(self._windows.values())}
        rotations = self._rotations(hidden, positions)
        layers = body.get_submodule(self._architecture.layers)
        for index, layer in zip(self.layer_range, layers.children(), strict=True):
            options: dict[str, Any] = {"attention_mask": masks[self._windows[index]]}
            if rotations:
                options["position_embeddings"] = rotations[self._rotation_of(index)]
            hidden = run_layer(layer, partial(_apply_layer, layer, options), hidden)
        return hidden

    def _embed(self, body: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
        names = self._architecture
        hidden: Tensor = body.get_submodule(names.embedding)(tokens.clamp(min=0).long()).float()
        if names.scales_embedding:
            hidden = hidden * torch.tensor(math.sqrt(self._config.hidden_size), dtype=hidden.dtype)
        if names.positions:
            hidden = hidden + body.get_submodule(names.positions)(positions).float()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        norm, head = self.head_modules()
        logits: Tensor = head(norm(hidden))
        cap = getattr(self._config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def head_modules(self) -> nn.ModuleList:
        names = self._architecture
        return nn.ModuleList([self.get_submodule(f"{names.root}.{names.norm}"), self.get_submodule(HEAD)])

    def _pack(self, hidden: Tensor, segments: Tensor | None) -> PackedSequences | None:
        config = self._config
        if segments is None or config._attn_implementation == "eager":
            return None
        head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kernel = varlen_kernel(hidden.device, head_width)
        # Elsewhere on a GPU one mask costs less than a launch for each sequence.
        return pack(segments, kernel) if kernel is not None or hidden.device.type == "cpu" else None

    def _mask(
        self, hidden: Tensor, window: int | None, segments: Tensor | None, packed: PackedSequences | None
    ) -> Tensor | PackedSequences | None:
        # Eager attention takes no bool mask and none of its own: it adds what it is given to the scores.
        if self._config._attn_implementation == "eager":
            return as_additive(attended_pairs(hidden, window, segments), hidden.dtype)
        if segments is None and (window is None or hidden.shape[1] <= window):
            return None
        return within(packed, window) or attended_pairs(hidden, window, segments)

    def _rotations(self, hidden: Tensor, positions: Tensor) -> dict[str, Any]:
        if self._rotary is None:
            return {}
        types = sorted({self._rotation_of(index) for index in self.layer_range})
        options = {kind: {"layer_type": kind} if self._architecture.rotary_by_type else {} for kind in types}
        return {kind: self._rotary(hidden, positions, **options[kind]) for kind in types}

    def _rotation_of(self, layer: int) -> str:
        return self._architecture.type_of(self._config, layer) if self._architecture.rotary_by_type else ""

    def keep_reference(self) -> None:
        if self._begins_with_adapter:
            keep_adapters(self)

    def as_reference(self) -> AbstractContextManager[None]:
        if self._frozen_as is None:
            return super().as_reference()
        # Adapters that begin as zeros are left out rather than kept; those of peft's DPO are copied likewise.
        return adapters_as_kept(self) if self._begins_with_adapter else adapters_off(self)

    def allocate(self) -> None:
        allocate(self)

    def load(self, name: str, values: Tensor) -> None:
        """Copies a file's values, float32 in the file's shape, into the parameter `name`. Call `allocate` before."""
        load_parameter(self, name, values, self._frozen_as)

    @torch.no_grad()
    def fill_at_random(self, generator: torch.Generator) -> None:
        for name, shape in self.file_shapes().items():
            self.load(name, torch.randn(shape, generator=generator) * 0.02)
        super().fill_at_random(generator)

    def fill_buffers(self, seed: int) -> None:
        self._rotary = self._make_rotary()

    def is_hidden_matrix(self, name: str) -> bool:
        root, layers = self._architecture.root, self._architecture.layers
        return name.startswith(f"{root}.{layers}.") and self.get_parameter(name).ndim == 2

    def file_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns parameter name -> shape in files, for the parameters that come from files. Valid only before `load`.

        In a run with LoRA these are the frozen parameters, otherwise all parameters.
        """
        shapes = {
            n: tuple(p.shape) for n, p in self.named_parameters() if self._frozen_as is None or not p.requires_grad
        }
        for name, module in self.named_modules():
            if isinstance(module, FrozenLinear):
                shapes[f"{name}.weight"] = module.file_shape()
        return shapes

    def file_names(self, name: str) -> tuple[str, ...]:
        """The likeliest first. Some files, such as GPT-2's, leave out the root; a tied head has the embedding's."""
        names = self._architecture
        name = name.replace(INSIDE_LORA, ".")
        if name == f"{HEAD}.weight" and self._config.tie_word_embeddings:
            name = f"{names.root}.{names.embedding}.weight"
        return name, name.removeprefix(f"{names.root}.")


def _apply_layer(layer: nn.Module, options: dict[str, Any], hidden: Tensor) -> Tensor:
    output: Any = layer(hidden, **options)
    after: Tensor = output[0] if isinstance(output, tuple) else output  # GPT-2's is a tuple in transformers 5.0
    return after


def _embedding(rows: int, width: int, padding: int | None) -> nn.Embedding:
    # No values are drawn, because drawing on the meta device would import much of torch.
    return nn.Embedding(rows, width, padding, _weight=torch.empty(rows, width))


# --- rows that hold several sequences: which token attends to which, and each token's position


def token_positions(hidden: Tensor, segments: Tensor | None) -> Tensor:
    """Returns the position, from 0, of each token in its sequence, int64 [b, s]; [1, s] if each row is one sequence.

    hidden: [b, s, ...], for s and the device. segments: int [b, s], the number of each token's sequence, ascending in
    each row; None: each row is one sequence.
    """
    places = torch.arange(hidden.shape[1], device=hidden.device)[None]
    if segments is None:
        return places
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values


def attended_pairs(hidden: Tensor, window: int | None, segments: Tensor | None) -> Tensor:
    """Returns the causal attention mask, bool [b or 1, 1, s, s]: True where a token (row) attends to a token (column).

    window: how many of the last tokens of its own sequence, itself included; None: all before it. hidden, segments: see
    token_positions.
    """
    length = hidden.shape[1]
    places = torch.arange(length, device=hidden.device)
    ages = places[:, None] - places[None, :]
    allowed = ((ages >= 0) & (ages < (window or length)))[None, None]
    return allowed if segments is None else allowed & (segments[:, None, :, None] == segments[:, None, None, :])


def as_additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a bool mask to one of `dtype` to add to attention scores: 0 where allowed, else the dtype's minimum."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
