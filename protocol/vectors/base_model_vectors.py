"""The vectors of a base model's tensors on the wire: messages, tensor lists, and lists that must be refused.

make.py writes them to files with the others.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

import msgpack
from agora_protocol.frames import FrameType
from agora_protocol.limits import MAX_BASE_TENSORS
from agora_protocol.manifest import Manifest
from agora_protocol.messages import BaseIndex, GetBase, GetPiece, Message, TensorPiece
from agora_protocol.tensor_list import ListedTensor, TensorList, count_pieces, held_to_bits, size_in_bytes
from agora_protocol.tensors import WireTensor

LAYER: Final = "model.layers.0.mlp.gate_proj"


def base_model_frames() -> list[tuple[FrameType, int, Message | None, list[WireTensor]]]:
    """Returns frames of the base model: type, call, message, tensors."""
    kind = FrameType
    bits = WireTensor("uint8", (1,), memoryview(held_to_bits({0, 3}, 4)))
    piece = WireTensor("uint8", (5,), memoryview(b"agora"))
    return [
        (kind.REQUEST, 17, GetBase(30_000), []),
        (kind.ANSWER, 17, BaseIndex(311), [bits]),
        (kind.REQUEST, 19, GetPiece(-1, 0, 60_000), []),
        (kind.REQUEST, 19, GetPiece(2, 17, 60_000), []),
        (kind.ANSWER, 19, TensorPiece(), [piece]),
    ]


def adapted_manifest() -> Manifest:
    """Returns a manifest of a run that goes on from an adapter of its base model."""
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
    model = {
        "family": "hf",
        "config": json.dumps(config | {"max_position_embeddings": 128}),
        "context": 64,
        "weights": (("model.safetensors", hashlib.sha256(b"agora weights").hexdigest()),),
        "tensors_hash": hashlib.sha256(b"agora tensors").hexdigest(),
        "adapter_hash": hashlib.sha256(b"agora adapter").hexdigest(),
        "base_name": "agora/base",
        "trained": "lora",
        "lora_targets": ("q_proj", "v_proj"),
    }
    return Manifest.from_values({"name": "adapted", "model": model}, "vector")


def _listed(name: str, dtype: str, *shape: int) -> ListedTensor:
    pieces = range(count_pieces(size_in_bytes(dtype, shape)))
    return ListedTensor(name, dtype, shape, b"".join(hashlib.sha256(f"{name} {i}".encode()).digest() for i in pieces))


def _examples() -> list[tuple[TensorList, list[int]]]:
    head = _listed("lm_head.weight", "F32", 1024, 1025)
    others = [_listed("model.norm.weight", "F16", 8), _listed(f"{LAYER}.weight", "BF16", 24, 8)]
    return [(TensorList.of([*others, head, _listed(f"{LAYER}.scale", "F32")]), [0, 3]), (TensorList.of([head]), [0])]


def _refused() -> list[tuple[str, bytes]]:
    name, dtype, shape, hashes = "a", "F32", [2], hashlib.sha256(b"agora vector").digest()
    row = [name, dtype, shape, hashes]

    def packed(*rows: Any) -> bytes:
        return bytes(msgpack.packb([1, [*rows]]))

    return [
        ("no msgpack", b"\xc1"),
        ("another version", bytes(msgpack.packb([2, [row]]))),
        ("no tensor", packed()),
        ("a tensor twice", packed(row, row)),
        ("not sorted", packed(["b", dtype, shape, hashes], row)),
        ("a name with a blank", packed(["a b", dtype, shape, hashes])),
        ("an unlisted dtype", packed([name, "I8", shape, hashes])),
        ("a dimension of 0", packed([name, dtype, [0], b""])),
        ("seven dimensions", packed([name, dtype, [1] * 7, hashes])),
        ("a hash too few", packed([name, dtype, [1024, 1025], hashes])),
        ("a hash too many", packed([name, dtype, shape, 2 * hashes])),
        ("a hash as text", packed([name, dtype, shape, hashes.hex()])),
        ("an integer longer than it need be", packed(row).replace(b"\x91\x02", b"\x91\xcc\x02")),
        ("more tensors promised than a list may have", packed(*[row] * (MAX_BASE_TENSORS + 1))[:64]),
    ]


def tensor_lists() -> dict[str, Any]:
    """Returns tensor lists in their parts and as bytes with what peers have of them, and lists that must be refused."""
    lists = [
        {
            "tensors": [[t.name, t.dtype, t.shape, t.hashes] for t in made.tensors],
            "piece_bytes": [[t.piece_bytes(i) for i in range(t.piece_count)] for t in made.tensors],
            "bytes": made.to_bytes(),
            "tensors_hash": made.digest,
            "held": held,
            "bits": held_to_bits(held, len(made.tensors)),
        }
        for made, held in _examples()
    ]
    return {"lists": lists, "refused": [{"why": why, "code": "bad-message", "bytes": data} for why, data in _refused()]}
