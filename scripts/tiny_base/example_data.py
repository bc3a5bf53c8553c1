"""Example data for tuning, made of what the standard library says of itself: answers to questions, and preferences.

The same names give the same records, in the same order.

| file | a record | what can be learnt from it |
|---|---|---|
| sft.jsonl | `messages`: what does NAME do, the first line of its docstring | to answer so |
| dpo.jsonl | `prompt`, `chosen`, `rejected`: the right line against another | not to shout, to keep to the point |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from tiny_base.stdlib_docs import DocumentedName

SFT_FILE, DPO_FILE = "sft.jsonl", "dpo.jsonl"
MAX_SAMPLES: Final = 3000
MAX_PAIRS: Final = 1500

Record = Mapping[str, Any]


def write_examples(names: Sequence[DocumentedName], folder: Path) -> dict[str, int]:
    """Writes both files into `folder`, which it creates. Returns how many records each file has, by its name.

    Two thirds of the names become samples and one third preferences, so that no answer is in both.
    """
    shuffled = sorted(names, key=lambda name: _digest(name.name))
    third = len(shuffled) // 3
    records = {
        SFT_FILE: sft_records(shuffled[third:][:MAX_SAMPLES]),
        DPO_FILE: dpo_records(shuffled[:third][: MAX_PAIRS + 1]),
    }
    folder.mkdir()
    for file, lines in records.items():
        (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return {file: len(lines) for file, lines in records.items()}


def sft_records(names: Iterable[DocumentedName]) -> list[Record]:
    """Returns a conversation of one question and its answer for each name."""
    return [{"messages": [_message("user", question(name)), _message("assistant", name.summary)]} for name in names]


def dpo_records(names: Sequence[DocumentedName]) -> list[Record]:
    """Returns a preference for each name but the last: its summary is better than another text.

    That is in turn the summary in capitals, and the summary of the next name.
    """
    records: list[Record] = []
    for number, (name, following) in enumerate(pairwise(names)):
        worse = following.summary if number % 2 and following.summary != name.summary else shout(name.summary)
        records.append(
            {
                "prompt": [_message("user", question(name))],
                "chosen": [_message("assistant", name.summary)],
                "rejected": [_message("assistant", worse)],
            }
        )
    return records


def question(name: DocumentedName) -> str:
    """Returns the question for a name: by its dotted name, or by its signature; its hash decides."""
    if _digest(name.name)[-1] % 2:
        return f"What does {name.name} do?"
    return f"Describe {name.signature} of {name.name.rpartition('.')[0]}."


def shout(sentence: str) -> str:
    """Returns a sentence in capitals with exclamation marks."""
    return sentence.upper().rstrip(".") + "!!!"


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
