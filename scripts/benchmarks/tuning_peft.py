"""The baseline of the tuning benchmark: one process that tunes the whole model with transformers and peft.

Kept as good as a plain loop gets: no gradient checkpointing, gradients set to None, fused AdamW, the
loss read once per microbatch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from agora_protocol.manifest_model import HfSection
from torch import nn

from agora.core.optional_packages import import_tuning
from agora.train.device import choose_device, has_native_bf16
from agora.train.memory import keep_freed_memory
from benchmarks.worker import Channel
from benchmarks.workload import Work, loss_sum


def load_model(folder: Path, section: HfSection, device: torch.device) -> Any:
    """Returns the model in `folder` as peft tunes it: LoRA in all linear layers but the head, the rest frozen.

    The frozen weights are float32, or NF4 with double quantisation, as the section says; products are in bf16 where the
    device multiplies that in hardware, else in float32.
    """
    transformers, peft = import_tuning("transformers"), import_tuning("peft")
    options: dict[str, Any] = {"dtype": torch.float32}
    if section.frozen_as == "nf4":
        import_tuning("bitsandbytes")
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16 if has_native_bf16(device) else torch.float32,
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map=str(device), **options)
    lora = peft.LoraConfig(
        r=section.lora_rank, lora_alpha=section.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, lora).train()


def train(work: Work, model: Any, device: torch.device) -> Iterator[float]:
    """Trains without end, and yields the mean loss per token of each microbatch."""
    manifest = work.manifest
    trained = nn.ParameterList(parameter for parameter in model.parameters() if parameter.requires_grad)
    optimizer = work.optimizer(trained)
    target, in_bf16 = manifest.optimizer.target_tokens, has_native_bf16(device)
    microbatches = target // work.tokens_per_microbatch
    for step in itertools.count():
        for index in range(step * microbatches, (step + 1) * microbatches):
            tokens, targets = (ids.to(device) for ids in work.microbatch(index))
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=in_bf16):
                logits = model(input_ids=tokens).logits
            loss = loss_sum(logits, targets)
            (loss / target).backward()  # type: ignore[no-untyped-call]
            if index == (step + 1) * microbatches - 1:
                work.take_step(step, trained, optimizer)
            yield loss.item() / work.tokens_per_microbatch


def serve(spec: dict[str, Any], channel: Channel) -> None:
    """Says that it is ready; {"seconds": s} trains on as many microbatches as fill s.

    Answers with the tokens, the seconds and the mean loss.
    """
    keep_freed_memory()
    work, device = Work(spec), choose_device("auto")
    section = work.manifest.model
    if not isinstance(section, HfSection):
        raise ValueError("the manifest's model is not of the family hf")
    losses = train(work, load_model(Path(spec["base"]), section, device), device)
    channel.say({"ready": True})
    for order in channel.orders():
        began = time.perf_counter()
        taken = [next(losses)]
        while time.perf_counter() - began < order["seconds"]:
            taken.append(next(losses))
        seconds = time.perf_counter() - began
        tokens = len(taken) * work.tokens_per_microbatch
        channel.say({"tokens": tokens, "seconds": seconds, "loss": sum(taken) / len(taken)})
