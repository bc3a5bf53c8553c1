"""The `hf` family: decoders of Hugging Face whose weights come from a base model's files, trained in all parameters.

A tied head is untied: the first and the last stage are different peers, so the head begins as a copy of the embedding
and both learn on their own. Knows: names of tensors, keys of config.json. Must not know: where files lie, peers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from agora_protocol.base_config import parse_config
from agora_protocol.manifest import HfSection

from agora.model.base_model import WantedTensor, locate_tensors, read_tensors, require_folder
from agora.model.family import TRAINING_BYTES, Family, Stage
from agora.model.hf_architecture import architecture_of
from agora.model.hf_stage import HfStage
from agora.state.merged_model import ExportedTensor
from agora.state.model_card import ModelDescription

ACTIVATION_BYTES: Final = 64
"""Bytes for each token and value of the residual stream: a few microbatches' activations, at least."""
LOGIT_BYTES: Final = 8
"""Bytes for each token and token id in the last stage: its logit and the logit's gradient, float32."""


class HfFamily(Family):
    """The hf family with the base model of one manifest: makes HfStages, fills them from files, exports them."""

    def __init__(self, model: HfSection) -> None:
        self._model = model

    def check_machine(self, base_model: Path | None) -> None:
        """Raises TuningMissing without transformers, BaseModelError without the folder, ManifestError for the config.

        What the files in the folder are is checked when a stage is built.
        """
        require_folder(base_model)
        self.parameter_shapes(range(1))

    def make_stage(self, layers: range) -> Stage:
        """Returns an HfStage of `layers`, on the meta device, without values.

        Raises TuningMissing without transformers, ManifestError for a config that it refuses.
        """
        return HfStage(self._model, layers)

    def fill_weights(self, stage: Stage, seed: int, base_model: Path | None) -> None:
        """Gives the parameters of `stage` the values that the base model's files have. Raises BaseModelError.

        Before the first value is copied, names, shapes and hashes of all are checked.
        """
        assert isinstance(stage, HfStage)
        parameters = dict(stage.named_parameters())
        for name, values in read_tensors(base_model, self._model.weights, _wanted_tensors(stage)):
            parameters[name].copy_(values)

    def check_folder(self, base_model: Path) -> None:
        """Raises BaseModelError unless the folder's files have every tensor of the whole model. Hashes are not checked.

        For whoever writes the manifest. Raises TuningMissing, ManifestError.
        """
        with torch.device("meta"):
            whole = HfStage(self._model, range(self._model.layers))
        locate_tensors(base_model, [name for name, _ in self._model.weights], _wanted_tensors(whole))

    def memory_bytes(self, layers: range, tokens: int) -> int:
        """Returns TRAINING_BYTES * parameters + ACTIVATION_BYTES * tokens * width, and with the head the logits."""
        logits = LOGIT_BYTES * tokens * self._model.vocabulary if layers.stop == self._model.layers else 0
        activations = ACTIVATION_BYTES * tokens * self._model.width
        return TRAINING_BYTES * self.parameter_count(layers) + activations + logits

    def exported_tensors(self, layers: range, seed: int) -> list[ExportedTensor]:
        """Returns for each tensor of `layers` its name and shape, which are those of the Hugging Face model."""
        return [ExportedTensor(name, name, shape) for name, shape in self.parameter_shapes(layers).items()]

    def config_files(self, dtype: str, end_of_text: int | None) -> dict[str, dict[str, Any]]:
        """Returns config.json as it came, but with the export's dtype and an untied head.

        end_of_text is not written: the base model's config says which ids end a text.
        """
        config = parse_config(self._model.config)
        return {"config.json": {**config, "dtype": dtype, "torch_dtype": dtype, "tie_word_embeddings": False}}

    def describe(self) -> ModelDescription:
        """Returns the kind and the sizes of the decoder in words, for the model card."""
        model = self._model
        return ModelDescription(
            kind=f"A {architecture_of(model).words} decoder",
            shape=f"width {model.width}, {model.layers} layers, vocabulary {model.vocabulary}",
            is_pretrained=True,
        )


def _wanted_tensors(stage: HfStage) -> dict[str, WantedTensor]:
    """Returns what files must have for each parameter of the stage, by its name."""
    return {name: WantedTensor(stage.file_names(name), tuple(p.shape)) for name, p in stage.named_parameters()}
