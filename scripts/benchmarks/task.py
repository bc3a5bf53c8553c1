"""What the pipeline benchmark trains, as a manifest: the one description that every contender is built from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agora_protocol.manifest import Manifest

from agora.data.corpus import open_corpus
from agora.data.tokenizer import ByteTokenizer

MICROBATCHES_PER_STEP = 16
SEQUENCES = 2
CONTEXT = 256


def manifest_for(stages: int, sections: dict[str, dict[str, Any]] | None = None) -> Manifest:
    """A Llama-style decoder of about 6 M parameters on the standard library's source, cut into `stages`.

    `sections` overrides single keys, for tests that want it smaller.
    """
    wanted: dict[str, dict[str, Any]] = {
        "model": {"width": 256, "subspace": 256, "layers": 8, "heads": 4, "key_value_heads": 2, "feed_forward": 704},
        "stages": {"count": stages},
        "schedule": {"kind": "asynchronous", "microbatch": SEQUENCES, "max_in_flight": MICROBATCHES_PER_STEP},
        "optimizer": {"name": "adamw"},
    }
    wanted["model"]["context"] = CONTEXT
    for name, keys in (sections or {}).items():
        wanted.setdefault(name, {}).update(keys)
    tokens = int(wanted["schedule"]["microbatch"]) * int(wanted["model"]["context"])
    wanted["optimizer"]["target_tokens"] = tokens * MICROBATCHES_PER_STEP
    return Manifest.from_values(wanted, "benchmark")


def corpus_cache(folder: Path) -> Path:
    """Returns where the tokenized corpus lies in the benchmark's folder."""
    return folder / "corpus"


def prepare_corpus(folder: Path, manifest: Manifest | None = None) -> None:
    """Tokenizes the corpus once, before anything is measured."""
    open_corpus((manifest or manifest_for(1)).data.corpus, ByteTokenizer(), corpus_cache(folder))


def spec(manifest: Manifest, folder: Path, threads: int, **more: object) -> dict[str, object]:
    """Returns the spec of a child process: the manifest's text, the folder of the tokenized corpus, its threads."""
    return {"manifest": manifest.to_toml(), "cache": str(corpus_cache(folder)), "threads": threads, **more}
