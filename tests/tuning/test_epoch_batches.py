"""An origin's microbatches hold every sample once an epoch, and are the same on every machine; samples are counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from agora_protocol.errors import DataError
from agora_protocol.ids import PeerId

from agora.codec import decode_tokens
from agora.core.span_work import DrawnMicrobatch
from agora.tuning.chat.sample_rows import SampleRows, open_sample_rows
from agora.tuning.epochs.batches import EpochMicrobatches, SampleCounts
from agora.tuning.epochs.state import MAX_INT
from tests.tuning.sample_runs import completions, sample_run, samples_of, sequence_of, unpacked, write_records

ME, OTHER = PeerId("12D3KooWA"), PeerId("12D3KooWB")


def rows_of(tmp_path: Path, count: int, **run: Any) -> SampleRows:
    write_records(tmp_path / "samples.jsonl", completions(count))
    return open_sample_rows(sample_run(**run), tmp_path / "cache", base=tmp_path)


def batches_of(
    rows: SampleRows, me: PeerId = ME, session: int = 1, live: tuple[PeerId, ...] = (), b: int = 4
) -> EpochMicrobatches:
    return EpochMicrobatches(rows, 3, b, me, session, lambda: live)


def drawn(batches: EpochMicrobatches) -> DrawnMicrobatch:
    microbatch = batches.draw()
    assert microbatch is not None
    return microbatch


def samples_in(microbatch: DrawnMicrobatch, b: int = 4) -> list[Any]:
    tokens = decode_tokens(microbatch.tokens, 500, shape=(2, b, 32))
    return samples_of(unpacked(tokens.numpy()))


def test_an_epoch_holds_every_sample_once_and_what_fills_up_its_last_microbatch_is_counted(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 75)
    batches, each = batches_of(rows), rows.items
    wrapped = -each % 4
    assert wrapped, "else the test shows nothing"
    repeats = 0
    for epoch in range(2):
        found: Counter[Any] = Counter()
        for _ in range(batches.assigner.count):
            microbatch = drawn(batches)
            assert microbatch.number // batches.assigner.count == epoch
            found.update(samples_in(microbatch))
            batches.mark_completed(microbatch.number)
        assert found.keys() == set(map(sequence_of, completions(75)))
        first = samples_of(unpacked(rows.batch(batches.rows_of(epoch * batches.assigner.count)[:wrapped])))
        assert {sample for sample, times in found.items() if times > 1} == set(first)
        assert batches.counts().seen == 75 * (epoch + 1)
        repeats += len(first)
    assert batches.counts() == SampleCounts(epoch=2, seen=150, repeated=repeats, missed=0)


def test_fewer_rows_than_a_microbatch_holds_are_repeated_in_it(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 3, context=31)
    batches = batches_of(rows, b=16)
    assert rows.items < 16 and batches.assigner.count == 1
    microbatch = drawn(batches)
    assert set(samples_in(microbatch, 16)) == set(map(sequence_of, completions(3)))
    batches.mark_completed(microbatch.number)
    counts = batches.counts()
    assert counts.seen == 3 and counts.repeated == len(samples_in(microbatch, 16)) - 3


def test_a_microbatch_travels_in_the_shape_and_type_of_the_run(tmp_path: Path) -> None:
    microbatch = drawn(batches_of(rows_of(tmp_path, 60)))
    assert microbatch.tokens.shape == sample_run().tokens_shape() and microbatch.tokens.dtype == "uint8"
    tokens = decode_tokens(microbatch.tokens, 500)
    assert tokens.dtype == torch.int32 and int(tokens[1].max()) <= 3


def test_the_same_number_is_the_same_microbatch_everywhere(tmp_path: Path) -> None:
    one = batches_of(rows_of(tmp_path, 60))
    other = batches_of(rows_of(tmp_path, 60), OTHER, 2)
    for number in (0, 5, 7 * one.assigner.count + 3):
        assert one.rows_of(number).tolist() == other.rows_of(number).tolist()
    assert one.rows_of(0).tolist() != one.rows_of(one.assigner.count).tolist()


def test_pairs_stay_together(tmp_path: Path) -> None:
    records = [{"prompt": f"{n:03d}?", "chosen": "y", "rejected": "no"} for n in range(21)]
    write_records(tmp_path / "samples.jsonl", records)
    rows = open_sample_rows(sample_run("dpo"), tmp_path / "cache", base=tmp_path)
    batches = batches_of(rows)
    assert batches.assigner.count == 11
    prompts: Counter[Any] = Counter()
    for _ in range(11):
        microbatch = drawn(batches)
        chosen, rejected = (samples_in(microbatch)[side::2] for side in (0, 1))
        assert [ids[:4] for ids, _ in chosen] == [ids[:4] for ids, _ in rejected]
        assert all(ids[4:] == (*b"y", 0) for ids, _ in chosen) and all(ids[4:] == (*b"no", 0) for ids, _ in rejected)
        prompts.update(ids[:4] for ids, _ in chosen)
        batches.mark_completed(microbatch.number)
    assert len(prompts) == 21 and prompts.total() == 22
    assert batches.counts() == SampleCounts(epoch=1, seen=21, repeated=1, missed=0)


def test_two_origins_share_an_epoch_and_know_what_both_have_done(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 300)
    one, other = batches_of(rows, ME, 1, (ME, OTHER)), batches_of(rows, OTHER, MAX_INT, (ME, OTHER))
    found: Counter[Any] = Counter()
    for _ in range(4 * one.assigner.count):
        one.assigner.merge(OTHER, other.assigner.next_state())
        other.assigner.merge(ME, one.assigner.next_state())
        for batches in (one, other):
            if (microbatch := batches.draw()) is not None and microbatch.number < one.assigner.count:
                found.update(samples_in(microbatch))
            if microbatch is not None:
                batches.mark_completed(microbatch.number)
        if one.counts().epoch:
            break
    assert found.keys() == set(map(sequence_of, completions(300)))
    one.assigner.merge(OTHER, other.assigner.next_state())
    other.assigner.merge(ME, one.assigner.next_state())
    assert one.counts() == other.counts() and one.counts().missed == 0
    assert one.counts().epoch == 1 and 300 <= one.counts().seen < 400


def test_what_is_dropped_is_drawn_again(tmp_path: Path) -> None:
    batches = batches_of(rows_of(tmp_path, 60))
    first = drawn(batches)
    batches.release(first.number)
    assert first.number in {drawn(batches).number for _ in range(batches.assigner.count)}


def test_after_a_restart_the_epoch_goes_on_with_the_samples_that_were_not_done(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 300)
    before = batches_of(rows)
    done = [drawn(before) for _ in range(10)]
    for microbatch in done[:7]:
        before.mark_completed(microbatch.number)
    after = batches_of(rows, session=2)
    after.assigner.restore(before.assigner.snapshot())
    assert after.counts() == before.counts()
    rest = {drawn(after).number for _ in range(after.assigner.count - 7)}
    assert rest == set(range(after.assigner.count)) - {microbatch.number for microbatch in done[:7]}


def test_what_others_have_not_finished_of_an_older_epoch_is_missed_until_it_is_done(tmp_path: Path) -> None:
    batches = batches_of(rows_of(tmp_path, 300))
    late = drawn(batches)
    for _ in range(batches.assigner.count):
        batches.mark_completed(drawn(batches).number)
    assert batches.counts().missed == len(samples_in(late)) and batches.counts().epoch == 0
    batches.mark_completed(late.number)
    assert batches.counts().missed == 0 and batches.counts().epoch == 1


def test_an_evaluation_gets_the_same_held_out_microbatches_every_time(tmp_path: Path) -> None:
    batches = batches_of(rows_of(tmp_path, 200, heldout=0.3))
    first = [bytes(tokens.data) for tokens in batches.heldout_microbatches(3)]
    assert len(first) == 3 and first == [bytes(tokens.data) for tokens in batches.heldout_microbatches(3)]
    assert next(iter(batches.heldout_microbatches(1))).shape == (2, 4, 32)


def test_origins_with_other_rows_notice(tmp_path: Path) -> None:
    one = batches_of(rows_of(tmp_path, 60))
    other = batches_of(rows_of(tmp_path, 61), OTHER, 2)
    with pytest.raises(DataError, match=f"{OTHER} trains on other rows"):
        one.assigner.merge(OTHER, other.assigner.next_state())
