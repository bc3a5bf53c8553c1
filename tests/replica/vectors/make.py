"""Makes the vectors beside this file, the same bytes every time: `python tests/replica/vectors/make.py`.

For whoever writes a peer in another language: slices, parts, owners, dither and int8 parts, as section 12 of the
protocol's specification has them. In the JSON, {"hex": ...} are bytes; values are float32, little-endian.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from agora_protocol.identity import Identity
from agora_protocol.ids import RunId
from agora_protocol.limits import MAX_SMALL_PARTS, PART_ELEMENTS, SLICE_BLOCK
from agora_protocol.parts import fragment_count

from agora.replica.number_formats import NumberFormat
from agora.replica.reducers import FragmentDivision, reducers_of
from agora.replica.shard_codec import RoundConfig, Shard, cut_into_shards

HERE: Final = Path(__file__).parent
RUN: Final = RunId(hashlib.sha256(b"agora vector").hexdigest())
PEERS: Final = [Identity(hashlib.sha256(b"agora vector %d" % n).digest()).peer for n in range(5)]
TERMS: Final = RoundConfig(PEERS[0], RUN, "mean", 20.0, 1e9)


def _named(part: Shard) -> dict[str, Any]:
    names = ("stage", "what", "round", "part", "slices")
    values = (part.stage, part.wire_kind, part.round, part.position, part.fragments)
    return {"run": RUN, **dict(zip(names, values, strict=True))}


def _hex(data: Any) -> dict[str, str]:
    return {"hex": bytes(data).hex()}


def slices() -> list[dict[str, Any]]:
    """The blocks of the first rounds, and of one that is over the number of slices."""
    made = []
    for blocks, fraction, seed in ((1, 0.05, 0), (7, 0.05, 7), (24, 0.25, 7), (60, 0.3, 2**63), (100, 1.0, 1)):
        it = FragmentDivision(blocks * SLICE_BLOCK, fragment_count(fraction), seed)
        rounds = {str(number): it.blocks(number).tolist() for number in (0, 1, 2, 1_000_003)}
        made.append(
            {"elements": blocks * SLICE_BLOCK, "fraction": fraction, "seed": seed, "count": it.count, "blocks": rounds}
        )
    return made


def cuts() -> list[dict[str, Any]]:
    """Where the parts of slices begin and end."""
    largest = MAX_SMALL_PARTS * PART_ELEMENTS
    sizes = [SLICE_BLOCK, PART_ELEMENTS, PART_ELEMENTS + SLICE_BLOCK, 3 * PART_ELEMENTS]
    sizes += [largest, largest + SLICE_BLOCK, 2 * largest + SLICE_BLOCK, 5 * largest]
    return [{"elements": size, "parts": [[cut.start, cut.stop] for cut in cut_into_shards(size)]} for size in sizes]


def owned() -> list[dict[str, Any]]:
    """First and second reducers."""
    groups = [
        dict.fromkeys(PEERS[:1], 0.0),
        dict.fromkeys(PEERS[:3], 0.0),
        dict(zip(PEERS, (1e6, 2e6, 0.0, 25e6, 3.5e6), strict=True)),
    ]
    parts_of = [
        Shard(0, "fragment", 0, 0, 2),
        Shard(3, "fragment", 12, 1, 20),
        Shard(3, "fragment", 332, 1, 20),
        Shard(3, "fragment", 332, 1, 5),
        Shard(3, "gradient", 44, 1),
        Shard(1023, "fragment", 2**40, 77, 7),
    ]
    made = []
    for members in groups:
        for part in parts_of:
            first, second = reducers_of(TERMS.run, part, members)
            made.append({**_named(part), "members": members, "first": first, "second": second})
    return made


def _values() -> torch.Tensor:
    """Blocks of very different sizes, ties, zeros, and a last block that is not full."""
    noise = np.frombuffer(b"".join(hashlib.sha256(b"values %d" % n).digest() for n in range(6)), np.int8)
    usual = noise.astype(np.float32) / np.float32(100.0)
    ties = np.arange(-32, 32, dtype=np.float32) + np.float32(0.5)
    ties[0] = 100.0
    parts_of = [
        usual[:64],
        ties,
        np.zeros(64, np.float32),
        usual[64:128] * np.float32(1e-38),
        usual[128:192] * np.float32(1e30),
        np.full(64, 63.0, np.float32),
        usual[:7],
    ]
    return torch.from_numpy(np.concatenate(parts_of))


def int8() -> list[dict[str, Any]]:
    """Parts with their dither, and without any."""
    values = _values()
    made = []
    for part in (Shard(3, "fragment", 12, 1, 20), Shard(0, "gradient", 0, 0), None):
        dither = None if part is None else TERMS.dither_label(part)
        sent = NumberFormat("int8").encode(values.clone(), dither)
        back = NumberFormat("int8").decode(sent, len(values), dither)
        made.append(
            {
                "dither": part and _named(part),
                "values": _hex(values.numpy().astype("<f4").tobytes()),
                "levels": _hex(sent[0].data),
                "exponents": _hex(sent[1].data),
                "decoded": _hex(back.numpy().astype("<f4").tobytes()),
            }
        )
    return made


def normal() -> list[dict[str, Any]]:
    """Parts in 2, 3 and 4 bits."""
    values = _values()
    made = []
    for name in ("normal2", "normal3", "normal4"):
        sent = NumberFormat(name).encode(values.clone())
        back = NumberFormat(name).decode(sent, len(values))
        made.append(
            {
                "wire": name,
                "values": _hex(values.numpy().astype("<f4").tobytes()),
                "scales": _hex(sent[0].data),
                "levels": _hex(sent[1].data),
                "decoded": _hex(back.numpy().astype("<f4").tobytes()),
            }
        )
    return made


def build() -> str:
    """The text of averaging.json."""
    made = {"slices": slices(), "parts": cuts(), "owners": owned(), "int8": int8(), "normal": normal()}
    return json.dumps(made, indent=1) + "\n"


if __name__ == "__main__":
    (HERE / "averaging.json").write_text(build(), encoding="ascii")
    sys.stdout.write(f"{HERE / 'averaging.json'}\n")
