"""Turns text into samples: sources of text, tokenizers, the token cache, sampling.

Knows: files, token ids. Must not know: torch, models, the network.
"""

from agora.data.corpus import open_corpus
from agora.data.sampling import Sampler, sample_id
from agora.data.token_file import Corpus
from agora.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, open_tokenizer

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "JsonTokenizer",
    "Sampler",
    "Tokenizer",
    "open_corpus",
    "open_tokenizer",
    "sample_id",
]
