"""Model folders with a small tokenizer and a chat template, as Hugging Face models have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIALS = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
LETTERS = pre_tokenizers.ByteLevel.alphabet()

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

CHATML_WITH_BLOCKS = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

DROPS_EARLIER_THOUGHTS = """\
{%- for message in messages %}
{%- set thought = '<think></think>' if message.role == 'assistant' and loop.last else '' %}
{{- '<|im_start|>' + message.role + '\\n' + thought + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def write_folder(folder: Path, template: str | None = None, **settings: Any) -> Path:
    """A folder with a byte-level BPE whose file adds <|begin|> before a text and trims offsets, as that of Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=LETTERS, show_progress=False
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    begin = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<|begin|>", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True}}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
