"""Converts boundary tensors to wire tensors and back. Knows torch and wire tensors; must not know models or streams."""

from agora.codec.boundary_codec import BoundaryCodec, gradient_dither_key
from agora.codec.uncompressed import UncompressedCodec, all_finite, decode_tokens, encode_tokens

__all__ = [
    "BoundaryCodec",
    "UncompressedCodec",
    "all_finite",
    "decode_tokens",
    "encode_tokens",
    "gradient_dither_key",
]
