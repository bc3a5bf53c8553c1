"""What the reference said of a row is remembered by the row, whatever microbatch it comes in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from agora_protocol.tensors import WireTensor

from agora.codec import encode_tokens
from agora.pipeline.reference_cache import ReferenceCache
from agora.tuning.chat.sample_rows import open_sample_rows
from agora.tuning.epochs.batches import EpochMicrobatches
from tests.pipeline.world import peer_id
from tests.tuning.sample_runs import sample_run, write_records

EPOCHS = 3


def batch(*rows: int, top: int = 0) -> WireTensor:
    """Rows of 4 places with marks, each made of its number; `top` decides how wide the ids travel."""
    values = np.zeros((2, len(rows), 4), np.int32)
    values[0, :, 0], values[1, :, 1], values[0, 0, 3] = rows, 1, top
    return encode_tokens(values)


def test_rows_are_known_in_any_composition() -> None:
    cache = ReferenceCache()
    assert cache.look_up(batch(1, 2)) is None
    cache.remember(batch(1, 2), (-1.0, -2.0))
    cache.remember(batch(3, 4), (-3.0, -4.0))
    assert cache.look_up(batch(4, 1)) == (-4.0, -1.0)
    assert cache.look_up(batch(1, 5)) is None, "one row is not known"


def test_the_width_in_which_ids_travel_does_not_count() -> None:
    cache = ReferenceCache()
    cache.remember(batch(7, 8), (-7.0, -8.0))
    wide = batch(9, 8, top=100_000)
    assert wide.dtype != batch(7, 8).dtype
    cache.remember(wide, (-9.0, -88.0))
    assert cache.look_up(batch(8)) == (-8.0,)


def test_marks_are_part_of_a_row() -> None:
    ids = np.ones((2, 1, 4), np.int32)
    cache = ReferenceCache()
    cache.remember(encode_tokens(ids), (-1.0,))
    ids[1, 0, 2] = 0
    assert cache.look_up(encode_tokens(ids)) is None


def test_a_row_keeps_its_first_value() -> None:
    cache = ReferenceCache()
    cache.remember(batch(1, 2), (-1.0, -2.0))
    assert cache.remember(batch(2, 3), (-2.5, -3.0)) == (-2.0, -3.0)


def test_a_full_cache_keeps_the_first_rows_and_passes_the_others_on() -> None:
    cache = ReferenceCache(max_rows=2)
    cache.remember(batch(1, 2), (-1.0, -2.0))
    assert cache.remember(batch(3, 1), (-3.0, -1.5)) == (-3.0, -1.0)
    assert len(cache) == 2 and cache.look_up(batch(3)) is None and cache.look_up(batch(1)) == (-1.0,)


def test_an_epoch_of_real_pairs_is_known_in_the_next_ones(tmp_path: Path) -> None:
    pairs = [{"prompt": f"{n}?", "chosen": f"{n}!", "rejected": f"not {n}"} for n in range(21)]
    write_records(tmp_path / "samples.jsonl", pairs)
    rows = open_sample_rows(sample_run("dpo"), tmp_path / "cache", base=tmp_path)
    me = peer_id("origin")
    batches, cache, asked = EpochMicrobatches(rows, 3, 4, me, 1, lambda: (me,)), ReferenceCache(), [0] * EPOCHS
    for _ in range(EPOCHS * batches.assigner.count):
        drawn = batches.draw()
        assert drawn is not None
        if cache.look_up(drawn.tokens) is None:
            asked[drawn.number // batches.assigner.count] += 1
            cache.remember(drawn.tokens, (-1.0,) * 4)
        batches.mark_completed(drawn.number)
    assert asked[0] in (batches.assigner.count, batches.assigner.count - 1), "the last one is filled with known pairs"
    assert asked[1:] == [0] * (EPOCHS - 1)
