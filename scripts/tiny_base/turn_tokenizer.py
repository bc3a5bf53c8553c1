"""The tokenizer of the tiny model: byte-level BPE with tokens for turns, and the chat template that uses them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 4096
END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# The tokens with ids 0, 1 and 2: what separates documents, begins a turn, and ends a turn, which is also eos.
SPECIAL_TOKENS: Final = (END_OF_TEXT, TURN, END_OF_TURN)

CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.role == 'assistant' -%}"
    "{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message.content + '<|im_end|>' -}}{%- endif -%}"
    "{{- '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str]) -> Any:
    """Returns a `tokenizers.Tokenizer` whose VOCABULARY merges come from these texts; the same texts give the same one.

    Few texts may give fewer tokens than VOCABULARY.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # sorted, as it comes from a set
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render_turns(question: str, answer: str) -> str:
    """Returns a question and its answer as text, as CHAT_TEMPLATE writes them."""
    return f"{TURN}user\n{question}{END_OF_TURN}\n{TURN}assistant\n{answer}{END_OF_TURN}\n"


def write_tokenizer(tokenizer: Any, folder: Path, longest: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, the template in it. longest: tokens of the longest input."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN],
        "chat_template": CHAT_TEMPLATE,
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
