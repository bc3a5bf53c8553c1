"""Converts boundaries and token ids to wire tensors and back."""

from agora.codec.boundary_codec import BoundaryCodec, Download, EncodedTensor, gradient_dither_key
from agora.codec.uncompressed import (
    decode_tokens,
    decode_uncompressed,
    encode_tokens,
    encode_uncompressed,
    is_all_finite,
)

__all__ = [
    "BoundaryCodec",
    "Download",
    "EncodedTensor",
    "is_all_finite",
    "decode_tokens",
    "decode_uncompressed",
    "encode_tokens",
    "encode_uncompressed",
    "gradient_dither_key",
]
