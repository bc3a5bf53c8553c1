"""The presets of `swarm new --preset NAME`: runs for a laptop up to runs for many GPUs.

Tables: docs/reference/presets.md.

| preset  | parameters | for                                                                          |
|---------|------------|------------------------------------------------------------------------------|
| `tiny`  | 0.7 M      | trying everything on one machine in a minute                                 |
| `small` | 20 M       | a few machines without GPUs                                                  |
| `150m`  | 149 M      | cards of 8 GB and more, a few of them                                        |
| `1b`    | 988 M      | cards of 8 GB and more; a stage is one layer, and a card holds several       |
| `8b`    | 8.0 B      | cards of 8 GB and more; the last stage, which has the head, wants 12 GB      |

The three large ones are cut at every layer, so that a machine can hold as many as fit, next to each other. A step has
at least 128 microbatches: with the usual staleness of an eighth, as many are in flight as the model has stages. Their
vocabulary is 32,000: with 128,256 ids, no card of 12 GB could train the head of `8b` together with a layer.
"""

from __future__ import annotations

from typing import Any, Final

from agora_protocol.manifest_model import SubspaceSection, link_subspace

LINK_CODEC: Final = "int6/int3"  # the codec of the presets, for slow links; docs/understand/codecs.md says why

# The values of each preset that are not the manifest's defaults.
PRESETS: Final[dict[str, dict[str, Any]]] = {
    "tiny": {
        "name": "tiny",
        "model": {"width": SubspaceSection().width, "subspace": link_subspace(SubspaceSection().width)},
        "boundary": {"codec": LINK_CODEC},
        "optimizer": {"name": "muon", "learning_rate": 1.2e-2},
    },
    "small": {
        "name": "small",
        "model": {
            "width": 512,
            "subspace": link_subspace(512),
            "layers": 8,
            "heads": 8,
            "key_value_heads": 4,
            "feed_forward": 1408,
            "context": 256,
        },
        "stages": {"count": 4},
        "boundary": {"codec": LINK_CODEC},
        "optimizer": {
            "name": "muon",
            "learning_rate": 3e-3,
            "warmup_steps": 100,
            "total_steps": 20_000,
            "target_tokens": 65_536,
        },
    },
    "150m": {
        "name": "150m",
        "model": {
            "width": 768,
            "subspace": link_subspace(768),
            "layers": 16,
            "heads": 12,
            "key_value_heads": 4,
            "feed_forward": 3072,
            "context": 1024,
            "vocabulary": 32_000,
        },
        "stages": {"count": 16},
        "boundary": {"codec": LINK_CODEC},
        "optimizer": {
            "name": "muon",
            "learning_rate": 1.2e-3,
            "warmup_steps": 300,
            "total_steps": 6_000,
            "target_tokens": 524_288,
        },
        "schedule": {"microbatch": 4},
    },
    "1b": {
        "name": "1b",
        "model": {
            "width": 2048,
            "subspace": link_subspace(2048),
            "layers": 18,
            "heads": 32,
            "key_value_heads": 8,
            "feed_forward": 8192,
            "context": 2048,
            "vocabulary": 32_000,
        },
        "stages": {"count": 18},
        "boundary": {"codec": LINK_CODEC},
        "optimizer": {
            "name": "muon",
            "learning_rate": 6e-4,
            "warmup_steps": 500,
            "total_steps": 20_000,
            "target_tokens": 1_048_576,
        },
        "schedule": {"microbatch": 2},
    },
    "8b": {
        "name": "8b",
        "model": {
            "width": 4096,
            "subspace": link_subspace(4096),
            "layers": 44,
            "heads": 32,
            "key_value_heads": 8,
            "feed_forward": 14_336,
            "context": 2048,
            "vocabulary": 32_000,
            "rope_theta": 500_000.0,
        },
        "stages": {"count": 44},
        "boundary": {"codec": LINK_CODEC},
        "optimizer": {
            "name": "muon",
            "learning_rate": 4e-4,
            "warmup_steps": 1_000,
            "total_steps": 80_000,
            "target_tokens": 2_097_152,
            "average_decay": 0.0,
        },
        "schedule": {"microbatch": 1},
    },
}
