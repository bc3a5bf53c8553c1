"""Writes the model card of an export: what the model is, where it comes from, how to load it, what its limits are.

| kind    | what is exported                                                           |
|---------|----------------------------------------------------------------------------|
| model   | a whole model, all of whose parameters were trained                        |
| adapter | the LoRA matrices alone; peft adds them to the base model when it loads    |
| merged  | the whole base model, with the LoRA matrices added to its own              |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from agora_protocol.codec_names import parse_codec
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import HfSection

from agora.core.terminal_text import one_line

Kind = Literal["model", "adapter", "merged"]

CARD: Final = """\
---
library_name: {library}
pipeline_tag: text-generation
tags:
{tags}
{base_model}---

# {name}

{summary}

{facts}

## Load

{loading}

## Limits

{limits}

## The run

All that its peers agreed on; `run.toml` is the same with its founder's signature, and `export.json` lists the SHA-256 \
of every file here.{amendments}

{manifest}"""
AMENDMENTS: Final = """ Amendments changed it while it trained; the file `amendments` has each as it was signed, in hex:

{changes}

The manifest as it was founded:"""
BYTES: Final = "bytes"
# How the model was made, in words, by whether the run began with a trained model.
BEGINNINGS: Final = {False: "trained from nothing", True: "trained further from a model that others had trained"}
LIBRARIES: Final[Mapping[Kind, str]] = {"model": "transformers", "adapter": "peft", "merged": "transformers"}
FOLDER_CODE: Final = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."
model = AutoModelForCausalLM.from_pretrained(folder)"""
ADAPTER_CODE: Final = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."
base = AutoModelForCausalLM.from_pretrained({base})  # the folder or the name of the base model
model = PeftModel.from_pretrained(base, folder)"""
GGUF_CODE: Final = """\
```
llama-cli -m model.gguf -p "The" -no-cnv    # llama.cpp
ollama create my-model -f Modelfile         # Ollama
```"""
CHAT_CODE: Final = """\
messages = [{"role": "user", "content": "Hello"}]
chat = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
inputs = tokenizer.apply_chat_template(messages, **chat)"""
PLAIN_PROMPTS: Final = (
    "If the samples were texts as prompts and completions, they were learnt without the chat template: take "
    '`tokenizer(prompt, return_tensors="pt")` as inputs.'
)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the card states about the model's architecture.

    kind: such as "A Llama-style decoder".
    shape: sizes in words.
    is_pretrained: whether the run began with a model that others had trained.
    adapter: the adapter's sizes in words; "" if the whole model was trained.
    frozen_as: the dtype in which the frozen weights were kept; "" without an adapter.
    """

    kind: str
    shape: str
    is_pretrained: bool = False
    adapter: str = ""
    frozen_as: str = ""


@dataclass(frozen=True, slots=True)
class ExportDescription:
    """What the card states about the exported weights.

    parameters: how many.
    dtype: as transformers calls it.
    source: where the stages' weights come from, in words.
    average: whether the weights are moving averages over the steps.
    kind: model, adapter or merged.
    metrics: name -> value that the swarm reported when the stages were collected; {} if the swarm was not asked.
    changes: the run's amendments in words, in order.
    gguf: whether the weights are a file for llama.cpp.
    codec: of boundaries when the last step was taken, as it was amended; "" if it never was.
    """

    parameters: int
    dtype: str
    source: str
    average: bool
    kind: Kind = "model"
    metrics: Mapping[str, float] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    gguf: bool = False
    codec: str = ""


def model_card(
    manifest: Manifest, model: ModelDescription, steps: Mapping[int, int], exported: ExportDescription
) -> str:
    """Returns the model card, the Markdown text of README.md: facts, how to load the model, limits, the manifest.

    steps: stage -> number of optimizer steps that it has taken.
    """
    return CARD.format(
        library="gguf" if exported.gguf else LIBRARIES[exported.kind],
        tags="- agora\n- lora" if exported.kind == "adapter" else "- agora",
        base_model=_base_model_line(manifest),
        name=manifest.name,
        summary=_summary(manifest, model, exported),
        facts=_facts_table(manifest, model, steps, exported),
        loading=GGUF_CODE if exported.gguf else _loading_code(manifest, exported.kind),
        limits=_limits_list(manifest, model, steps, exported.kind, exported.codec or manifest.boundary.codec),
        amendments=AMENDMENTS.format(changes="\n".join(f"- {_cell(change)}" for change in exported.changes))
        if exported.changes
        else "",
        manifest="\n".join(f"    {line}".rstrip() for line in manifest.to_toml().splitlines()),
    )


def _base_model_of(manifest: Manifest) -> tuple[str, str]:
    # ("ORG/NAME", revision or "") of a model of the Hub; of another one the folder's name.
    named = manifest.model.base_name if isinstance(manifest.model, HfSection) else ""
    name, _, revision = named.partition("@") if "/" in named else (named, "", "")
    return name, revision


def _base_model_line(manifest: Manifest) -> str:
    name, _ = _base_model_of(manifest)
    return f"base_model: {name}\n" if "/" in name else ""


def _summary(manifest: Manifest, model: ModelDescription, exported: ExportDescription) -> str:
    count = f"{exported.parameters:,} parameters"
    run = f"the agora run `{manifest.run_id}`"
    match exported.kind:
        case "adapter":
            return (
                f"A LoRA adapter of {count} for {_lower_first(model.kind)}, trained by a swarm of peers: {run}. It is "
                "not a model by itself: it is loaded beside its base model, whose files `[model] weights` below names, "
                "each with its SHA-256."
            )
        case "merged":
            return (
                f"{model.kind} of {count}: a model that others had trained, with a LoRA adapter merged into it that a "
                f"swarm of peers trained: {run}."
            )
    return f"{model.kind} of {count}, {BEGINNINGS[model.is_pretrained]} by a swarm of peers: {run}."


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _facts_table(
    manifest: Manifest, model: ModelDescription, steps: Mapping[int, int], exported: ExportDescription
) -> str:
    average = f"exponential moving average over the steps, decay up to {manifest.optimizer.average_decay:g}"
    rows = {
        "shape": model.shape,
        "context": f"{manifest.model.context} tokens",
        **({"adapter": model.adapter, "base model while training": model.frozen_as} if model.adapter else {}),
        "weights": f"{exported.dtype}, {average if exported.average else 'those of the last step'}",
        "objective": _objective_words(manifest),
        "data": _data_words(manifest),
        "optimizer steps": ", ".join(f"stage {stage}: {step:,}" for stage, step in sorted(steps.items())),
        "target of a step": f"{manifest.optimizer.target_tokens:,} tokens",
        "schedule": manifest.schedule.kind,
        "stages from": exported.source,
        **{f"{name}, when the stages were collected": f"{value:.4g}" for name, value in exported.metrics.items()},
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows.items())])


def _cell(text: str) -> str:
    return one_line(text).replace("|", "\\|")


def _objective_words(manifest: Manifest) -> str:
    objective = manifest.objective
    match objective.kind:
        case "sft":
            return "sft: the answers and completions of samples"
        case "dpo":
            smoothing = f", label smoothing {objective.label_smoothing:g}" if objective.label_smoothing else ""
            loss = f"{objective.preference_loss} loss, beta {objective.beta:g}{smoothing}"
            return f"dpo: which of two answers is preferred ({loss})"
    return "lm: every next token of text"


def _data_words(manifest: Manifest) -> str:
    data = manifest.data
    if manifest.objective.kind == "lm":
        return ", ".join(data.corpus)
    columns = ", ".join(f"{name} from {column}" for name, column in data.columns)
    samples = ", ".join(data.sample_paths)
    return f"{samples} ({columns})" if columns else samples


def _loading_code(manifest: Manifest, kind: Kind) -> str:
    name, revision = _base_model_of(manifest)
    base = json.dumps(name or "BASE-MODEL", ensure_ascii=False) + (f', revision="{revision}"' if revision else "")
    # Training adds no special tokens either.
    no_special_tokens = "" if manifest.data.tokenizer == BYTES else ", add_special_tokens=False"
    is_text = manifest.objective.kind == "lm"
    code = "\n".join(
        [
            "```python",
            ADAPTER_CODE.format(base=base) if kind == "adapter" else FOLDER_CODE,
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            f'inputs = tokenizer("The", return_tensors="pt"{no_special_tokens})' if is_text else CHAT_CODE,
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))",
            "```",
        ]
    )
    return code if is_text else f"{code}\n\n{PLAIN_PROMPTS}"


def _limits_list(
    manifest: Manifest, described: ModelDescription, steps: Mapping[int, int], kind: Kind, codec: str
) -> str:
    model = manifest.model
    pretrained = [
        *_precision_limits(described.frozen_as, kind),
        f"- This run trained it on {model.context} tokens at once; what it makes of more comes from before.",
        "- What it could do before may have become better or worse; nothing filters what it says.",
        "- Whoever publishes it answers for the terms of the base model, and of the text that `[data]` below names.",
    ]
    from_nothing = [
        f"- It has never seen more than {model.context} tokens at once; positions beyond that are untrained.",
        "- A base model: it continues text. It was not tuned to follow instructions, and nothing filters what it says.",
        "- What it knows and repeats is what `[data]` below names; whoever publishes it answers for that data's terms.",
    ]
    lines = [
        *(pretrained if described.is_pretrained else from_nothing),
        "- Exporting checks that every tensor is whole, not that the model is good: measure it on text of your own.",
    ]
    columns = parse_codec(codec).columns
    if columns:
        lines.append(
            f"- It was trained with {columns} of its {model.boundary_width} columns between stages, and here has all "
            "of them: it may predict worse than the swarm said, much worse where most were left out."
        )
    if manifest.data.tokenizer == BYTES:
        lines.append("- A token is a byte of UTF-8; id 0 ends a document. The tokenizer has no special tokens.")
    if len(set(steps.values())) > 1:
        lines.append("- The stages were at different steps when they were collected, as they are all through the run.")
    return "\n".join(lines)


def _precision_limits(frozen_as: str, kind: Kind) -> list[str]:
    if kind == "adapter":
        return [
            f"- It was trained beside weights kept as {frozen_as}. Beside the same model in another precision its "
            "answers differ a little; beside another model they mean nothing."
        ]
    if kind == "merged" and frozen_as != "float32":
        return [
            f"- The adapter was trained beside the base model's weights kept as {frozen_as}, and is merged into the "
            "weights of the base model's files, which were not rounded so. What it learnt to correct of the rounding "
            "is not there any more: the loss may differ a little from the swarm's, in either direction."
        ]
    return []
