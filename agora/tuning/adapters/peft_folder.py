"""An adapter that a run goes on from: reads the folder that peft or `swarm export` wrote, and checks that it fits.

The run's first step computes what peft computes with it; an adapter of which that cannot be said is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from agora_protocol.limits import MAX_CONFIG_BYTES
from agora_protocol.manifest_model import ADAPTER_FILE, HfSection
from safetensors import safe_open
from torch import nn

from agora.core.hub_files import ADAPTER_CONFIG_FILE
from agora.core.optional_packages import import_tuning
from agora.core.terminal_text import one_line
from agora.tuning.adapters.frozen_layers import linear_layers
from agora.tuning.adapters.lora import ADAPTER_ROOT, lora_targets
from agora.tuning.base.hf_architecture import architecture_of
from agora.tuning.base.hub import public_name
from agora.tuning.base.model_files import file_hash, read_header, read_text, refuse_pointer
from agora.tuning.base.store import BaseModelError, read_tensor_locations
from agora.tuning.hf_stage import HEAD, HfStage

MERGE: Final = (
    "merge it into its base model with peft (merge_and_unload, save_pretrained), and name that folder: --base-model DIR"
)
PICKLED: Final = "adapter_model.bin"
MAX_ADAPTER_CONFIG_BYTES: Final = 16 * MAX_CONFIG_BYTES  # some list each of hundreds of layers
HUB_COMMIT: Final = 40  # hex digits
# What does not change what an adapter computes, beside what is checked by name below.
WITHOUT_EFFECT: Final = frozenset(
    ["peft_type", "task_type", "inference_mode", "auto_mapping", "peft_version", "fan_in_fan_out", "eva_config"]
)
# Other ways to begin change the base model's weights too, so the adapter alone is not what was learnt.
PLAIN_BEGINNINGS: Final = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter that fits a base model. hash: SHA-256 of its file. base_name: of the base model, "" if unknown."""

    folder: Path
    hash: str
    rank: int
    alpha: float
    rslora: bool
    dropout: float
    targets: tuple[str, ...]
    base_name: str

    def manifest_values(self) -> dict[str, Any]:
        """Returns the values of [model] with which a run goes on from it."""
        return {
            "adapter_hash": self.hash,
            "lora_rank": self.rank,
            "lora_alpha": self.alpha,
            "lora_rslora": self.rslora,
            "lora_dropout": self.dropout,
            "lora_targets": self.targets,
        }

    def sentence(self) -> str:
        public = public_name(self.folder)
        named = public if "/" in public else str(self.folder)  # the id rather than its folder in the Hub's cache
        scale = "alpha / sqrt(rank)" if self.rslora else "alpha / rank"
        made_for = f"; made for {one_line(self.base_name, 100)}" if self.base_name else ""
        return (
            f"begins with {one_line(named, 200)}: LoRA of rank {self.rank}, alpha {self.alpha:g} ({scale}), "
            f"dropout {self.dropout:g}, in {', '.join(self.targets)}{made_for}"
        )


def read_adapter(folder: Path, model: HfSection) -> PeftAdapter:
    """Returns the LoRA adapter in `folder`, for the base model of `model`; the LoRA values of `model` do not matter.

    Reads the whole file, for its hash and to find values that are not finite. Raises BaseModelError for an adapter that
    is unreadable, that does not fit the model's layers, or of another base model, and for what LoRA of a run does not
    have; PackageMissing without a package, ManifestError for a wrong model config.
    """
    config = _read_config(folder)
    rank, alpha, dropout = config.get("r", 8), config.get("lora_alpha", 8), config.get("lora_dropout", 0.0)
    if type(rank) is not int or rank < 1:
        raise _refused(folder, f"r {rank!r} is not a rank")
    if type(alpha) not in (int, float) or not 0 < alpha <= 1e6:
        raise _refused(folder, f"lora_alpha {alpha!r} is not a number above 0")
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise _refused(folder, f"lora_dropout {dropout!r} is not a share from 0 to 1")
    _require_plain_lora(folder, config)
    base_name = _check_base_name(folder, config, model.base_name)
    file = folder / ADAPTER_FILE
    if not file.is_file():
        pickled = f", only {PICKLED}, which is pickled" if (folder / PICKLED).is_file() else ""
        raise BaseModelError(
            f"{folder} has no {ADAPTER_FILE}{pickled}; load the adapter with peft, and write it with "
            "save_pretrained(DIR, safe_serialization=True)."
        )
    refuse_pointer(file)
    with torch.device("meta"):
        whole = HfStage(model.model_copy(update={"trained": "all"}), range(model.layers))
    is_transposed = architecture_of(model).is_transposed
    targets = _fit_targets(folder, config.get("target_modules"), whole, is_transposed, rank)
    _require_finite(file)
    rslora = config.get("use_rslora") or False
    if not isinstance(rslora, bool):
        raise _refused(folder, f"use_rslora {rslora!r} is neither true nor false")
    return PeftAdapter(folder, file_hash(file), rank, float(alpha), rslora, float(dropout), targets, base_name)


def check_adapter(model: HfSection, adapter: Path) -> None:
    """Raises BaseModelError unless the run of `model` goes on from the adapter in this folder as peft would use it."""
    if not model.adapter_hash:
        raise BaseModelError(not_from_an_adapter(adapter))
    found = read_adapter(adapter, model)
    require_hash(adapter, model.adapter_hash)
    ours = dict(found.manifest_values(), lora_targets=sorted(found.targets))
    theirs = model.model_dump() | {"lora_targets": sorted(lora_targets(model, architecture_of(model).linears))}
    for key, value in ours.items():
        if theirs[key] != value:
            raise BaseModelError(
                f"[model] {key} is {theirs[key]}, and that of the adapter in {adapter} is {value}; correct it, or "
                f"write the manifest anew with `swarm new --adapter {adapter}`."
            )


def require_hash(adapter: Path, digest: str) -> None:
    """Raises BaseModelError unless the adapter's file in this folder is there and has the SHA-256 `digest`."""
    if not (adapter / ADAPTER_FILE).is_file():
        raise BaseModelError(f"--adapter {adapter} has no {ADAPTER_FILE}; name the folder of the run's adapter.")
    if (found := file_hash(adapter / ADAPTER_FILE)) != digest:
        raise BaseModelError(
            f"{adapter / ADAPTER_FILE} has the SHA-256 {found[:16]}..., and the manifest says {digest[:16]}...; name "
            "the folder of the adapter that the run begins with, or leave --adapter out: peers give it."
        )


def not_from_an_adapter(adapter: Path) -> str:
    return (
        f"--adapter {adapter} is named, and this run begins with no adapter; leave it out, or write a manifest that "
        f"goes on from it: swarm new run.toml --base-model DIR --adapter {adapter}"
    )


def _refused(folder: Path, what: str) -> BaseModelError:
    return BaseModelError(f"{folder / ADAPTER_CONFIG_FILE}: {one_line(what, 300)}; {MERGE}.")


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise BaseModelError(f"--adapter {folder} is not a folder; name the one that has the adapter's files.")
    if not (folder / ADAPTER_CONFIG_FILE).is_file():
        raise BaseModelError(
            f"{folder} has no {ADAPTER_CONFIG_FILE}, so it is no adapter of peft; name a folder that save_pretrained "
            "of peft or `swarm export` has written, or a whole model with --base-model."
        )
    try:
        config = json.loads(read_text(folder / ADAPTER_CONFIG_FILE, MAX_ADAPTER_CONFIG_BYTES))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise BaseModelError(
            f"{folder / ADAPTER_CONFIG_FILE} is not a JSON object; write it again with save_pretrained."
        )
    return config


def _require_plain_lora(folder: Path, config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise _refused(folder, f"peft_type is {config.get('peft_type')!r}, and a run trains LORA only")
    if (beginning := config.get("init_lora_weights")) not in PLAIN_BEGINNINGS:
        raise _refused(folder, f"init_lora_weights {beginning!r} changes the base model too")
    usual = _usual_values()
    checked = {"r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "init_lora_weights"}
    checked |= {"base_model_name_or_path", "revision"}
    for key, value in config.items():
        # An empty value stands for something that is off, in every version of peft.
        if key in checked | WITHOUT_EFFECT or value in (None, False, [], {}, "") or value == usual.get(key):
            continue
        raise _refused(folder, f"{key} = {json.dumps(value)[:100]} is not supported")


def _usual_values() -> dict[str, Any]:
    fields = dataclasses.fields(import_tuning("peft").LoraConfig)
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def _check_base_name(folder: Path, config: dict[str, Any], base_name: str) -> str:
    # Two names of the Hub can be compared; the path of a folder says nothing on another machine.
    named, revision = config.get("base_model_name_or_path") or "", config.get("revision") or ""
    if not isinstance(named, str) or not isinstance(revision, str):
        raise _refused(folder, "base_model_name_or_path and revision are not texts")
    ours, _, our_revision = base_name.partition("@")
    both_of_hub = named.count("/") == ours.count("/") == 1 and not named.startswith((".", "~", "/"))
    is_other = both_of_hub and named.lower() != ours.lower()
    both_commits = len(revision) == len(our_revision) == HUB_COMMIT
    if is_other or (both_of_hub and both_commits and revision != our_revision):
        wanted = f"{named}@{revision}" if revision else named
        raise BaseModelError(
            f"The adapter in {folder} was made for {one_line(wanted, 200)}, not for {base_name}; name that with "
            f"--base-model, or, if both are the same model, correct it in {ADAPTER_CONFIG_FILE}."
        )
    return named


def _fit_targets(folder: Path, named: Any, whole: HfStage, is_transposed: bool, rank: int) -> tuple[str, ...]:
    # Returns the kinds of linear layers, such as q_proj, that have LoRA in every layer, by config and tensors alike.
    linears = linear_layers(whole)
    matched = [name for name in linears if _is_named(folder, name, named)]
    if not matched:
        raise _refused(folder, "target_modules names no linear layer of the base model")
    if HEAD in matched:
        raise _refused(folder, f"target_modules has {HEAD}, and a run has LoRA inside of layers only")
    kinds = sorted({name.rpartition(".")[2] for name in matched})
    if absent := [name for name in linears if name.rpartition(".")[2] in kinds and name not in matched]:
        raise _refused(folder, f"target_modules leaves out {absent[0]}, and a run has LoRA in all layers alike")
    expected: dict[str, tuple[int, ...]] = {}
    for name in matched:
        outputs, inputs = _sizes(linears[name], is_transposed)
        expected[f"{ADAPTER_ROOT}{name}.lora_A.weight"] = (rank, inputs)
        expected[f"{ADAPTER_ROOT}{name}.lora_B.weight"] = (outputs, rank)
    _require_tensors(folder / ADAPTER_FILE, expected)
    return tuple(kinds)


def _is_named(folder: Path, linear: str, named: Any) -> bool:
    # As peft decides it for a list. An expression is not tried: one of a stranger can take for ever.
    if named == "all-linear":
        return linear != HEAD
    if not isinstance(named, list) or not all(isinstance(target, str) for target in named):
        raise BaseModelError(
            f"{folder / ADAPTER_CONFIG_FILE}: target_modules is not a list of names; write there the layers that have "
            'matrices, such as ["q_proj", "v_proj"].'
        )
    return any(linear == target or linear.endswith(f".{target}") for target in named)


def _sizes(linear: nn.Module, is_transposed: bool) -> Sequence[int]:
    shape = linear.get_parameter("weight").shape
    return shape[::-1] if is_transposed and not isinstance(linear, nn.Linear) else shape


def _require_tensors(file: Path, expected: dict[str, tuple[int, ...]]) -> None:
    found = read_tensor_locations(file)  # before safetensors' own reader, which has no limits
    names = {tensor.name for tensor in read_header(file)}
    if extra := sorted(names - expected.keys()):
        raise BaseModelError(
            f"{file} has {one_line(extra[0], 200)}, which is no LoRA matrix of a layer in target_modules of this base "
            f"model; it is of another model, or trains more than LoRA: {MERGE}."
        )
    for name, shape in expected.items():
        if name not in names:
            raise BaseModelError(f"{file} has no {name}, which its config asks for; save the adapter again with peft.")
        if name not in found:
            raise BaseModelError(f"{file}: {name} is neither F32 nor BF16 nor F16; save it again in one of these.")
        if found[name].shape != shape:
            raise BaseModelError(
                f"{file}: {name} has the shape {list(found[name].shape)}, and rank and base model give it "
                f"{list(shape)}; name the base model that the adapter was made for: --base-model DIR."
            )


def _require_finite(file: Path) -> None:
    with safe_open(file, framework="pt") as reader:
        for name in reader.keys():  # noqa: SIM118 - it is not a mapping
            if not math.isfinite(float(reader.get_tensor(name).float().abs().sum(dtype=torch.float64))):
                raise BaseModelError(f"{file}: {name} has values that are not finite; take an earlier checkpoint.")
