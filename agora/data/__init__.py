"""Text becomes microbatches: formats, tokenizers, the token cache, sampling. Knows files, no torch and no network."""

from agora.data.corpus import Corpus, open_corpus
from agora.data.sampling import Sampler, sample_id
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
