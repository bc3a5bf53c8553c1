"""The model card of an export: what the model is, where it comes from, how to load it, what not to expect of it.

Knows the manifest and how far each stage was. Must not know weights, files or peers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agora_protocol.codec_names import parse_codec
from agora_protocol.manifest import Manifest

BYTES: Final = "bytes"


def model_card(manifest: Manifest, steps: Mapping[int, int], parameters: int, dtype: str, source: str) -> str:
    """README.md. steps: of each stage; dtype: as transformers calls it; source: in words, where the stages are from."""
    return "\n\n".join(
        [
            "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- agora\n---",
            f"# {manifest.name}",
            f"A Llama-style decoder of {parameters:,} parameters, trained from nothing by a swarm of peers: the agora "
            f"run `{manifest.run_id}`.",
            _facts(manifest, steps, dtype, source),
            "## Load",
            _load(manifest),
            "## Limits",
            _limits(manifest, steps),
            "## The run",
            "All that its peers agreed on; `run.toml` is the same with its founder's signature, and `export.json` "
            "lists the SHA-256 of every file here.",
            "\n".join(f"    {line}".rstrip() for line in manifest.to_toml().splitlines()),
        ]
    )


def _facts(manifest: Manifest, steps: Mapping[int, int], dtype: str, source: str) -> str:
    model, least = manifest.model, min(steps.values())
    rows = {
        "shape": f"width {model.width}, {model.layers} layers, {model.heads} heads of which {model.key_value_heads} "
        f"have keys and values, feed-forward {model.feed_forward}, vocabulary {model.vocabulary}",
        "context": f"{model.context} tokens",
        "weights": dtype,
        "optimizer steps": ", ".join(f"stage {stage}: {step:,}" for stage, step in sorted(steps.items())),
        "tokens": f"about {least * manifest.optimizer.target_tokens:,} "
        f"({least:,} steps of {manifest.optimizer.target_tokens:,})",
        "schedule": manifest.schedule.kind,
        "stages from": source,
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _load(manifest: Manifest) -> str:
    """Training adds no special tokens, so reading must not either; bytes have none to add."""
    plain = "" if manifest.data.tokenizer == BYTES else ", add_special_tokens=False"
    return f"""\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
text = tokenizer("The", return_tensors="pt"{plain})
print(tokenizer.decode(model.generate(**text, max_new_tokens=100)[0]))
```"""


def _limits(manifest: Manifest, steps: Mapping[int, int]) -> str:
    model = manifest.model
    lines = [
        f"- It has never seen more than {model.context} tokens at once; positions beyond that are untrained.",
        "- A base model: it continues text. It was not tuned to follow instructions, and nothing filters what it says.",
        "- What it knows and repeats is what `[data]` below names; whoever publishes it answers for that data's terms.",
        "- Exporting checks that every tensor is whole, not that the model is good: measure it on text of your own.",
    ]
    columns = parse_codec(manifest.boundary.codec).columns
    if columns:
        lines.append(
            f"- It was trained with {columns} of its {model.subspace} columns between stages, and here has all of "
            "them: it may predict worse than the swarm said, much worse where most were left out."
        )
    if manifest.data.tokenizer == BYTES:
        lines.append("- A token is a byte of UTF-8; id 0 ends a document. The tokenizer has no special tokens.")
    if len(set(steps.values())) > 1:
        lines.append("- The stages were at different steps when they were collected, as they are all through the run.")
    return "\n".join(lines)
