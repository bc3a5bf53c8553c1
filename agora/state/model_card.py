"""Writes the model card of an export: what the model is, where it comes from, how to load it, what its limits are.

Knows: the manifest, the family's own words, the step of each stage. Must not know: weights, files, peers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agora_protocol.codec_names import parse_codec
from agora_protocol.manifest import Manifest

BYTES: Final = "bytes"
BEGINNINGS: Final = {False: "trained from nothing", True: "trained further from a model that others had trained"}
"""How a model came to be, by whether the run began with a trained model."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What only the family can say of a model. kind: such as "A Llama-style decoder"; shape: its sizes, in words.

    is_pretrained: whether the run began with a model that others had trained.
    """

    kind: str
    shape: str
    is_pretrained: bool = False


@dataclass(frozen=True, slots=True)
class ExportInWords:
    """What the card says of the exported weights. parameters: how many. dtype: as transformers calls it.

    source: where the stages come from, in words. average: whether they are the moving averages of the trained weights.
    """

    parameters: int
    dtype: str
    source: str
    average: bool


def model_card(manifest: Manifest, model: ModelDescription, steps: Mapping[int, int], exported: ExportInWords) -> str:
    """Returns the model card, README.md: facts, how to load the model, its limits, and the whole manifest.

    steps: the steps that each stage has taken.
    """
    return "\n\n".join(
        [
            "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- agora\n---",
            f"# {manifest.name}",
            f"{model.kind} of {exported.parameters:,} parameters, {BEGINNINGS[model.is_pretrained]} by a swarm of "
            f"peers: the agora run `{manifest.run_id}`.",
            _facts_table(manifest, model, steps, exported),
            "## Load",
            _loading_code(manifest),
            "## Limits",
            _limits_list(manifest, steps, model.is_pretrained),
            "## The run",
            "All that its peers agreed on; `run.toml` is the same with its founder's signature, and `export.json` "
            "lists the SHA-256 of every file here.",
            "\n".join(f"    {line}".rstrip() for line in manifest.to_toml().splitlines()),
        ]
    )


def _facts_table(manifest: Manifest, model: ModelDescription, steps: Mapping[int, int], exported: ExportInWords) -> str:
    """Returns a Markdown table: the model's sizes, weights, steps of each stage, their target, schedule and source."""
    average = f"exponential moving average over the steps, decay up to {manifest.optimizer.average_decay:g}"
    rows = {
        "shape": model.shape,
        "context": f"{manifest.model.context} tokens",
        "weights": f"{exported.dtype}, {average if exported.average else 'those of the last step'}",
        "optimizer steps": ", ".join(f"stage {stage}: {step:,}" for stage, step in sorted(steps.items())),
        "target of a step": f"{manifest.optimizer.target_tokens:,} tokens",
        "schedule": manifest.schedule.kind,
        "stages from": exported.source,
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _loading_code(manifest: Manifest) -> str:
    """Returns Python code, in Markdown, that loads the model and samples text."""
    no_special_tokens = "" if manifest.data.tokenizer == BYTES else ", add_special_tokens=False"  # nor does training
    return f"""\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
text = tokenizer("The", return_tensors="pt"{no_special_tokens})
print(tokenizer.decode(model.generate(**text, max_new_tokens=100)[0]))
```"""


def _limits_list(manifest: Manifest, steps: Mapping[int, int], is_pretrained: bool) -> str:
    """Returns a Markdown list of the model's limits, some of which depend on the manifest and the steps."""
    model = manifest.model
    pretrained = [
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
        *(pretrained if is_pretrained else from_nothing),
        "- Exporting checks that every tensor is whole, not that the model is good: measure it on text of your own.",
    ]
    columns = parse_codec(manifest.boundary.codec).columns
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
