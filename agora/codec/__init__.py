"""Boundary tensor <-> wire tensor. Knows torch and the wire's tensor type; must not know models, peers or streams."""

from agora.codec.boundary import BoundaryCodec, codec_by_name, gradient_key
from agora.codec.dense import DenseCodec, all_finite, decode_tokens, encode_tokens

__all__ = [
    "BoundaryCodec",
    "DenseCodec",
    "all_finite",
    "codec_by_name",
    "decode_tokens",
    "encode_tokens",
    "gradient_key",
]
