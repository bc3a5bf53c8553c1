"""Which ids end an answer, as training renders it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from agora.tuning.chat.model_tokenizer import open_model_tokenizer, turn_end_ids
from tests.tuning.chat_folders import CHATML, CHATML_WITH_BLOCKS, DROPS_EARLIER_THOUGHTS, write_folder

BEGIN, END = 0, 2
NO_END = "{%- for message in messages %}{{- message.role + ': ' + message.content }}{%- endfor %}"
REFUSES = "{{- raise_exception('no such conversation') }}"


@pytest.mark.parametrize(
    ("template", "eos", "ends"),
    [
        (CHATML, "<|im_end|>", (END,)),
        (CHATML, "<|begin|>", (END, BEGIN)),
        (CHATML_WITH_BLOCKS, "<|begin|>", (END, BEGIN)),
        (DROPS_EARLIER_THOUGHTS, "<|begin|>", (END, BEGIN)),
        (None, "<|begin|>", (BEGIN,)),
        (NO_END, "<|begin|>", (BEGIN,)),
        (REFUSES, "<|begin|>", (BEGIN,)),
        (CHATML, "two tokens", (END,)),
    ],
)
def test_the_templates_turn_ends_and_the_tokenizers_own_end_are_told(
    template: str | None, eos: str, ends: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "model", template, eos_token=eos)
    assert turn_end_ids(open_model_tokenizer(folder, datetime.now())) == ends


def test_bytes_end_by_the_byte_0() -> None:
    assert turn_end_ids(open_model_tokenizer(None, datetime.now())) == (0,)
