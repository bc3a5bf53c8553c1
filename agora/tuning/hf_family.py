"""The `hf` family: decoders of Hugging Face whose weights come from a base model's files.

Either all parameters are trained, or only the LoRA matrices while the others are frozen; only trained parameters are
counted and averaged. A tied head is untied: the first and the last stage are on different peers, so the head
begins as a copy of the embedding, and if all is trained the two are trained separately. With LoRA both stay as they
are, so that a merged model is tied as the base model is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from agora_protocol.base_config import parse_config
from agora_protocol.manifest_model import HfSection

from agora.core.hub_files import ADAPTER_CONFIG_FILE, CONFIG_FILE, GENERATION_CONFIG_FILE
from agora.model.family import Family, StageModule
from agora.state.export_tensors import ExportedTensor, ReadTrained, TensorBlocks
from agora.state.model_card import ModelDescription
from agora.tuning.adapters.lora import (
    LoraProduct,
    adapter_config,
    adapter_tensor_name,
    initial_lora_values,
    lora_scaling,
    lora_targets,
    matrices_by_weight,
    merged_tensor,
)
from agora.tuning.base.hf_architecture import architecture_of
from agora.tuning.base.model_files import (
    WantedTensor,
    locate_checked,
    locate_tensors,
    read_generation_config,
    read_tensors,
    require_folder,
)
from agora.tuning.hf_stage import HfStage

END_IDS: Final = "eos_token_id"


class HfFamily(Family):
    """The model family `hf` for the base model of one manifest: makes HfStages, fills them from files, exports them.

    See Family for the methods that it overrides.
    """

    def __init__(self, model: HfSection) -> None:
        self._model = model
        self._has_lora = model.trained == "lora"

    def check_machine(self, base_model: Path | None) -> None:
        require_folder(base_model)
        self.parameter_shapes(range(1))

    def make_meta_stage(self, layers: range) -> StageModule:
        return HfStage(self._model, layers)

    def fill_trained(self, stage: StageModule, seed: int, base_model: Path | None) -> None:
        if not self._has_lora:
            self._read_files(stage, base_model)
        elif self._model.adapter_hash:
            for name, values in read_tensors(base_model, self._model.files, adapter_tensors(stage)):
                stage.get_parameter(name).copy_(values)
        else:
            for name, parameter in stage.trained_parameters():
                parameter.copy_(initial_lora_values(seed, name, parameter.shape))

    def fill_frozen(self, stage: StageModule, base_model: Path | None) -> None:
        if self._has_lora:
            self._read_files(stage, base_model)

    def _read_files(self, stage: StageModule, base_model: Path | None) -> None:
        assert isinstance(stage, HfStage)
        for name, values in read_tensors(base_model, self._model.weights, wanted_tensors(stage)):
            stage.load(name, values)
            del values  # or it would stay in memory while the next one is read

    def check_folder(self, base_model: Path) -> None:
        """Raises BaseModelError unless the folder's files have every tensor of the whole model, in shape and dtype.

        Reads only the headers of the files: hashes are not checked. Used to write a manifest. Raises PackageMissing
        without a package, ManifestError for a wrong config.
        """
        with torch.device("meta"):
            whole = HfStage(self._model, range(self._model.layers))
        locate_tensors(base_model, [name for name, _ in self._model.weights], wanted_tensors(whole))

    def exported_tensors(self, layers: range, seed: int) -> list[ExportedTensor]:
        shapes = self.parameter_shapes(layers)
        named = {name: adapter_tensor_name(name) if self._has_lora else name for name in shapes}
        return [ExportedTensor(name, named[name], shape) for name, shape in shapes.items()]

    def config_files(
        self, dtype: str, end_of_text: int | None, turn_ends: Sequence[int] = ()
    ) -> dict[str, dict[str, Any]]:
        if self._has_lora:
            return {ADAPTER_CONFIG_FILE: adapter_config(self._model)}
        return {
            CONFIG_FILE: {**self._base_config(dtype), "tie_word_embeddings": False},
            **self._generation({}, turn_ends),
        }

    def merged_tensors(self, base_model: Path, read_trained: ReadTrained) -> list[TensorBlocks]:
        whole_section = self._model.model_copy(update={"trained": "all"})
        with torch.device("meta"):
            whole = HfStage(whole_section, range(self._model.layers))
        wanted = {whole.file_names(name)[0]: tensor for name, tensor in wanted_tensors(whole).items()}
        stored = locate_checked(base_model, self._model.weights, wanted)
        matrices = matrices_by_weight(self.parameter_shapes(range(self._model.layers)))
        products = {weight: self._product(a, b, read_trained) for weight, (a, b) in matrices.items()}
        return [merged_tensor(name, place, products.get(name)) for name, place in stored.items()]

    def _product(self, name_a: str, name_b: str, read_trained: ReadTrained) -> LoraProduct:
        return LoraProduct(
            read_a=partial(read_trained, name_a),
            read_b=partial(read_trained, name_b),
            scale=lora_scaling(self._model),
            is_transposed=architecture_of(self._model).is_transposed,
        )

    def merged_config_files(
        self, base_model: Path, dtype: str, turn_ends: Sequence[int] = ()
    ) -> dict[str, dict[str, Any]]:
        generation = read_generation_config(base_model)
        return {CONFIG_FILE: self._base_config(dtype), **self._generation(generation, turn_ends)}

    def _generation(self, values: dict[str, Any], turn_ends: Sequence[int]) -> dict[str, dict[str, Any]]:
        if turn_ends:
            known = values.get(END_IDS, parse_config(self._model.config).get(END_IDS))
            ends = known if isinstance(known, list) else [known]
            values = {**values, END_IDS: list(dict.fromkeys([*turn_ends, *(n for n in ends if isinstance(n, int))]))}
        return {GENERATION_CONFIG_FILE: values} if values else {}

    def _base_config(self, dtype: str) -> dict[str, Any]:
        return {**parse_config(self._model.config), "dtype": dtype, "torch_dtype": dtype}

    def describe(self) -> ModelDescription:
        model = self._model
        return ModelDescription(
            kind=f"A {architecture_of(model).display_name} decoder",
            shape=f"width {model.width}, {model.layers} layers, vocabulary {model.vocabulary}",
            is_pretrained=True,
            adapter=self._adapter_words() if self._has_lora else "",
            frozen_as=model.frozen_as if self._has_lora else "",
        )

    def _adapter_words(self) -> str:
        model = self._model
        targets = ", ".join(sorted(lora_targets(model, architecture_of(model).linears)))
        scale = f"{model.lora_alpha:g} / {'sqrt(rank)' if model.lora_rslora else 'rank'}"
        begun = f", begun as the adapter of SHA-256 {model.adapter_hash}" if model.adapter_hash else ""
        return f"LoRA of rank {model.lora_rank}, scale {scale}, dropout {model.lora_dropout:g}, in {targets}{begun}"


def wanted_tensors(stage: HfStage) -> dict[str, WantedTensor]:
    """Returns, by parameter name, the tensors of a stage that are in the base model's files: no LoRA matrices."""
    return {name: WantedTensor(stage.file_names(name), shape) for name, shape in stage.file_shapes().items()}


def adapter_tensors(stage: StageModule) -> dict[str, WantedTensor]:
    """Returns, by parameter name, the LoRA matrices of a run that goes on from an adapter."""
    return {n: WantedTensor((adapter_tensor_name(n),), tuple(p.shape)) for n, p in stage.trained_parameters()}


def needed_tensors(model: HfSection, layers: range) -> list[WantedTensor]:
    """Returns every tensor that these layers read from files, without duplicates.

    Reads no file; importing transformers may take seconds. Raises PackageMissing, ManifestError.
    """
    with torch.device("meta"):
        stage = HfStage(model, layers)
    wanted = [*wanted_tensors(stage).values(), *(adapter_tensors(stage).values() if model.adapter_hash else ())]
    return list(dict.fromkeys(wanted))
