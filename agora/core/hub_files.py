"""The names of the files in the folder of a model or adapter, as transformers and peft write them and the Hub has them.

`agora_protocol.manifest_model` has the name of an adapter's weights, ADAPTER_FILE.
"""

from __future__ import annotations

from typing import Final

CONFIG_FILE: Final = "config.json"  # the model's architecture and sizes
GENERATION_CONFIG_FILE: Final = "generation_config.json"  # how text is sampled, and where it ends
WEIGHTS_FILE: Final = "model.safetensors"  # of a model whose weights are one file
WEIGHTS_INDEX_FILE: Final = "model.safetensors.index.json"  # tensor -> file, of a model with several
TOKENIZER_FILE: Final = "tokenizer.json"
TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
CHAT_TEMPLATE_FILE: Final = "chat_template.jinja"
ADAPTER_CONFIG_FILE: Final = "adapter_config.json"
