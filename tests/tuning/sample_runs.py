"""Manifests of runs that learn samples, files with samples, and what rows hold as sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agora_protocol.manifest import Manifest

from agora.tuning.chat.sample_rows import MarkedRows

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "vocab_size": 500,
    "max_position_embeddings": 4096,
}

Sequence = tuple[tuple[int, ...], tuple[bool, ...]]
"""Token ids, and which of them are supervised."""


def sample_run(kind: str = "sft", context: int = 31, microbatch: int = 4, seed: int = 3, **data: Any) -> Manifest:
    model = {"family": "hf", "config": json.dumps(CONFIG), "weights": [["model.safetensors", "0" * 64]]}
    return Manifest.from_values(
        {
            "seed": seed,
            "model": {**model, "context": context, "trained": "lora"},
            "optimizer": {"target_tokens": microbatch * context},
            "schedule": {"microbatch": microbatch},
            "data": {"samples": "samples.jsonl", "heldout": 0.0, **data},
            "objective": {"kind": kind},
        },
        "run.toml",
    )


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def completions(count: int, longest: int = 20) -> list[dict[str, str]]:
    """Prompts and completions of many lengths, each with its number in it; the longest has `longest` characters."""
    return [{"prompt": f"{n:04d}?", "completion": "x" * (n * 7 % (longest - 5) + 1)} for n in range(count)]


def sequence_of(record: dict[str, str], answer: str = "completion") -> Sequence:
    """What the tokenizer of bytes makes of a record."""
    prompt, completion = record["prompt"].encode(), record[answer].encode() + b"\0"
    return (*prompt, *completion), (*[False] * len(prompt), *[True] * len(completion))


def unpacked(batch: MarkedRows) -> list[list[Sequence]]:
    """The sequences of each row of a batch [2, b, s + 1], the empty rest of a row among them."""
    rows = []
    for ids, marks in zip(*batch.tolist(), strict=True):
        starts = [place for place, mark in enumerate(marks) if mark & 2]
        assert starts[0] == 0
        ends = [*starts[1:], len(ids)]
        rows.append(
            [(tuple(ids[a:b]), tuple(bool(mark & 1) for mark in marks[a:b])) for a, b in zip(starts, ends, strict=True)]
        )
    return rows


def samples_of(rows: list[list[Sequence]]) -> list[Sequence]:
    """The sequences with something supervised; the others must be an empty rest at a row's end."""
    found = []
    for row in rows:
        for place, (ids, supervised) in enumerate(row):
            assert not supervised[0]
            if any(supervised):
                found.append((ids, supervised))
            else:
                assert place == len(row) - 1 and not any(ids)
    return found
