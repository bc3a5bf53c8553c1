"""Other people's fine-tuning as a measure: TRL's trainers on the same base, samples, order and initial adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import HfSection
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.model.tiny_models import PAD, VOCABULARY

ROOT = "base_model.model."


@dataclass(frozen=True)
class Answered:
    """A prompt with its answer, token ids."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Pair:
    """A prompt with the answer that is preferred and the one that is not."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


@dataclass(frozen=True)
class TrlRun:
    """logs: what the trainer reports of each step. adapter: its matrices at the end, by our names."""

    logs: list[dict[str, float]]
    adapter: dict[str, np.ndarray]

    @property
    def losses(self) -> list[float]:
        return [log["loss"] for log in self.logs]


def answered_samples(count: int, seed: int = 0) -> list[Answered]:
    """Prompts of 2 to 5 ids with answers of 3 to 15."""
    random = np.random.default_rng(seed)
    return [Answered(_ids(random, 2, 6), _ids(random, 3, 16)) for _ in range(count)]


def preference_pairs(count: int, seed: int = 0) -> list[Pair]:
    """Prompts with two answers of different lengths."""
    random = np.random.default_rng(seed)
    return [Pair(_ids(random, 2, 6), _ids(random, 3, 16), _ids(random, 3, 16)) for _ in range(count)]


def _ids(random: np.random.Generator, least: int, below: int) -> list[int]:
    return [int(i) for i in random.integers(PAD + 1, VOCABULARY, random.integers(least, below))]


def _tokenizer() -> PreTrainedTokenizerFast:
    words = models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token=f"t{PAD}", eos_token="t1")


def _arguments(manifest: Manifest, folder: Path, steps: int, batch: int, accumulated: int) -> dict[str, Any]:
    optimizer = manifest.optimizer
    return {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulated,
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": 0,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "max_length": None,
    }


def _lora(model: HfSection) -> LoraConfig:
    return LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        use_rslora=model.lora_rslora,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def _train(trainer: Any, adapter: Mapping[str, np.ndarray]) -> TrlRun:
    """Trains with the adapter's matrices as the initial ones."""
    named = {ROOT + name: torch.from_numpy(values.copy()) for name, values in adapter.items()}
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert trained == named.keys(), sorted(trained ^ named.keys())[:4]
    trainer.model.load_state_dict(named, strict=False)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    found = dict(trainer.model.named_parameters())
    return TrlRun(logs, {name: found[ROOT + name].detach().numpy().copy() for name in adapter})


def run_sft(
    manifest: Manifest,
    base: PreTrainedModel,
    samples: Sequence[Answered],
    adapter: Mapping[str, np.ndarray],
    folder: Path,
    *,
    batch: int,
    accumulated: int = 1,
) -> TrlRun:
    """Trains with SFTTrainer, `batch * accumulated` samples a step, in their order."""
    assert isinstance(manifest.model, HfSection)
    rows = [
        {"input_ids": s.prompt + s.answer, "completion_mask": [0] * len(s.prompt) + [1] * len(s.answer)}
        for s in samples
    ]
    steps = len(rows) // (batch * accumulated)
    arguments = SFTConfig(**_arguments(manifest, folder, steps, batch, accumulated), completion_only_loss=True)
    trainer = SFTTrainer(
        model=base,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=_tokenizer(),
        peft_config=_lora(manifest.model),
    )
    return _train(trainer, adapter)


class _TokenisedDpo(DPOTrainer):
    """DPOTrainer for samples that are token ids already."""

    def _prepare_dataset(self, dataset: Dataset, *rest: Any, **more: Any) -> Dataset:
        return dataset


def run_dpo(
    manifest: Manifest,
    base: PreTrainedModel,
    pairs: Sequence[Pair],
    adapter: Mapping[str, np.ndarray],
    folder: Path,
    *,
    batch: int,
    goes_on: bool = False,
) -> TrlRun:
    """Trains with DPOTrainer, `batch` pairs a step, in their order.

    goes_on: `adapter` was trained before, so that the trainer gets a PeftModel that has it already.
    """
    assert isinstance(manifest.model, HfSection)
    rows = [{"prompt_ids": p.prompt, "chosen_ids": p.chosen, "rejected_ids": p.rejected} for p in pairs]
    objective = manifest.objective
    arguments = DPOConfig(
        **_arguments(manifest, folder, len(rows) // batch, batch, 1),
        beta=objective.beta,
        loss_type=[objective.preference_loss],
        remove_unused_columns=False,
    )
    model: Any = base
    if goes_on:
        model = get_peft_model(base, _lora(manifest.model))
        named = {ROOT + name: torch.from_numpy(values.copy()) for name, values in adapter.items()}
        model.load_state_dict(named, strict=False)
    trainer = _TokenisedDpo(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=_tokenizer(),
        peft_config=None if goes_on else _lora(manifest.model),
    )
    return _train(trainer, adapter)
