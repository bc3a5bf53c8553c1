"""Every sample that can be learnt is in one row, whole and marked; rows are made once, and are the same for all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agora_protocol.errors import DataError, DiskError, ManifestError
from hypothesis import given, settings
from hypothesis import strategies as st

from agora.tuning.chat import sample_rows
from agora.tuning.chat.model_tokenizer import open_training_tokenizer
from agora.tuning.chat.sample_file import check_samples, hash_samples
from agora.tuning.chat.sample_formats import ReadingCounts
from agora.tuning.chat.sample_rows import RowBuilder, RowSummary, SampleRows, open_sample_rows
from agora.tuning.chat.supervision import TokenSequence
from tests.tuning.chat_folders import CHATML, CHATML_WITH_BLOCKS, write_folder
from tests.tuning.sample_runs import completions, sample_run, samples_of, sequence_of, unpacked, write_records

RECORDS = completions(200)
PINNED = "5a6b92ec4099b0ab850019f8060fc91b59d4d57b61e2d912df9055dc179c694b"


def opened(tmp_path: Path, records: list[dict[str, Any]] | None = None, cache: str = "cache", **run: Any) -> SampleRows:
    write_records(tmp_path / "samples.jsonl", RECORDS if records is None else records)
    return open_sample_rows(sample_run(**run), tmp_path / cache, base=tmp_path)


def training_rows(rows: SampleRows) -> list[Any]:
    return unpacked(rows.batch(range(rows.summary.rows)))


def heldout_rows(rows: SampleRows, batch: int = 1) -> list[Any]:
    return [row for each in rows.heldout_batches(batch) for row in unpacked(each)]


# --- sft


def test_every_sample_is_in_one_row_with_what_is_learnt_of_it(tmp_path: Path) -> None:
    rows = opened(tmp_path)
    assert Counter(samples_of(training_rows(rows))) == Counter(map(sequence_of, RECORDS))
    batch = rows.batch([3, 0, 3])
    assert batch.dtype == np.int32 and batch.shape == (2, 3, 32) == tuple(sample_run(microbatch=3).tokens_shape())
    assert (batch[:, 0] == batch[:, 2]).all() and (batch[:, 1] == rows.batch([0])[:, 0]).all()


def test_the_counts_are_what_the_rows_hold(tmp_path: Path) -> None:
    too_long = {"prompt": "p" * 10, "completion": "c" * 100}
    nothing_left = {"prompt": "p" * 40, "completion": "c"}
    rows = opened(tmp_path, [*RECORDS, too_long, nothing_left], heldout=0.2)
    summary, packed, held = rows.summary, training_rows(rows), samples_of(heldout_rows(rows))
    trained = samples_of(packed)
    assert summary.samples == 202 and summary.truncated == 2 and summary.left_out == 1
    assert summary.trained == len(trained) and summary.heldout == len(held)
    assert summary.trained + summary.heldout == 201
    assert summary.supervised == sum(sum(supervised) for _, supervised in trained)
    assert summary.tokens == sum(len(ids) for ids, _ in trained)
    assert summary.rows == rows.items == len(packed) and summary.heldout_rows == len(heldout_rows(rows))
    assert rows.samples_in(range(len(packed))).tolist() == [len(samples_of([row])) for row in packed]
    assert (tuple(b"p" * 10 + b"c" * 22), (False,) * 10 + (True,) * 22) in [*trained, *held]


def test_held_out_samples_are_never_trained_on_and_come_in_the_same_order(tmp_path: Path) -> None:
    rows = opened(tmp_path, heldout=0.2)
    trained, held = samples_of(training_rows(rows)), samples_of(heldout_rows(rows))
    assert not set(trained) & set(held) and len(trained) + len(held) == 200 and 20 <= len(held) <= 60
    batches = list(rows.heldout_batches(4))
    assert len(batches) == rows.summary.heldout_rows // 4 and all(batch.shape == (2, 4, 32) for batch in batches)
    assert all((a == b).all() for a, b in zip(batches, rows.heldout_batches(4), strict=True))
    assert len(list(rows.heldout_batches(4, 1))) == 1
    (batch,) = rows.heldout_batches(100)
    assert batch.shape == (2, 100, 32) and Counter(samples_of(unpacked(batch))).keys() == set(held)


def test_another_seed_holds_out_others(tmp_path: Path) -> None:
    held = [set(samples_of(heldout_rows(opened(tmp_path, seed=seed, heldout=0.2)))) for seed in (1, 2)]
    assert held[0] != held[1]


@pytest.mark.parametrize("heldout", [1e-9, 0.5])
def test_few_samples_have_both_sides(tmp_path: Path, heldout: float) -> None:
    for seed in range(8):
        summary = opened(tmp_path, RECORDS[:2], seed=seed, heldout=heldout).summary
        assert summary.trained == summary.heldout == 1


def test_without_a_held_out_share_there_is_nothing_to_evaluate(tmp_path: Path) -> None:
    assert not list(opened(tmp_path).heldout_batches(4))


def test_packing_in_chunks_loses_nothing_and_bounds_what_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = opened(tmp_path, heldout=0.3)
    monkeypatch.setattr(sample_rows, "CHUNK_TOKENS", 200)
    monkeypatch.setattr(sample_rows, "CHUNK_ROWS", 1)
    rows = opened(tmp_path, cache="other", heldout=0.3)
    assert len(rows.summary.chunks) > 5
    assert set(samples_of(training_rows(rows))) == set(samples_of(training_rows(whole)))
    assert set(samples_of(heldout_rows(rows))) == set(samples_of(heldout_rows(whole)))
    every = [samples_of(unpacked(rows.batch([row]))) for row in range(rows.summary.rows)]
    assert every == [samples_of([row]) for row in training_rows(rows)]
    assert rows.samples_in(range(rows.summary.rows)).tolist() == [len(samples) for samples in every]


def test_the_default_chunks_are_packed_nearly_full() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 60_000), 2, 1025).astype(int)
    builder = RowBuilder("x", "sft", 1024, 256, ReadingCounts(), seed=0, heldout=0.0)
    ids, offsets = np.ones(1025, np.int32), np.zeros((0, 2), np.int32)
    learnt = np.arange(1025) > 0
    stored = sum(
        piece.size
        for piece in builder.iter_arrays(
            (TokenSequence(ids[:n], learnt[:n], offsets, "", 0),) for n in lengths.tolist()
        )
    )
    summary = builder.summary()
    assert len(summary.chunks) > 2 and stored == summary.rows * 1025 + summary.rows
    assert summary.tokens / (summary.rows * 1025) > 0.995


def test_a_row_that_is_numbered_too_high_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    rows = opened(tmp_path)
    for row in (-1, rows.summary.rows):
        with pytest.raises(ValueError, match="a row is not in 0 to"):
            rows.batch([0, row])


# --- dpo


def preferences(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{n:03d}?", "chosen": "y" * (n % 9 + 1), "rejected": "n" * (n % 5 + 2)} for n in range(count)]


def test_a_pair_is_two_rows_the_chosen_one_first(tmp_path: Path) -> None:
    records = [*preferences(30), {"prompt": "p" * 31, "chosen": "yes", "rejected": "no"}]
    records += [{"prompt": "p" * 40, "chosen": "y", "rejected": "n"}]
    rows = opened(tmp_path, records, kind="dpo", heldout=0.2)
    summary, pairs = rows.summary, training_rows(rows)
    assert summary.rows == len(pairs) == 2 * rows.items == 2 * summary.trained
    assert summary.samples == 32 and summary.truncated == 2 and summary.left_out == 1
    assert summary.trained + summary.heldout == 31
    found = [(samples_of([chosen]), samples_of([rejected])) for chosen, rejected in zip(pairs[::2], pairs[1::2])]
    held = heldout_rows(rows, 2)
    found += [(samples_of([chosen]), samples_of([rejected])) for chosen, rejected in zip(held[::2], held[1::2])]
    cut = ((*b"p" * 31, *b"y"), (False,) * 31 + (True,)), ((*b"p" * 31, *b"n"), (False,) * 31 + (True,))
    expected = [(sequence_of(each, "chosen"), sequence_of(each, "rejected")) for each in records[:30]] + [cut]
    assert Counter((one[0], other[0]) for one, other in found) == Counter(expected)
    assert rows.samples_in(range(summary.rows)).tolist() == [1, 0] * rows.items
    assert len(list(rows.heldout_batches(4))) == max(1, summary.heldout_rows // 4)


# --- once per machine


def test_the_rows_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(tmp_path, heldout=0.1)
    monkeypatch.setattr(sample_rows, "tokenise", None)
    again = open_sample_rows(sample_run(heldout=0.1), tmp_path / "cache", base=tmp_path)
    assert again.summary == first.summary and again.fingerprint == first.fingerprint
    assert (again.batch([0, 1]) == first.batch([0, 1])).all()


@pytest.mark.parametrize(
    "change", [{"seed": 4}, {"context": 32}, {"heldout": 0.2}, {"columns": [["prompt", "completion"]]}]
)
def test_whatever_changes_the_rows_makes_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    opened(tmp_path, heldout=0.1)
    monkeypatch.setattr(sample_rows, "tokenise", None)
    with pytest.raises((TypeError, DataError)):
        open_sample_rows(sample_run(**{"heldout": 0.1, **change}), tmp_path / "cache", base=tmp_path)


def test_a_changed_file_and_a_changed_template_make_new_rows(tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    folder = write_folder(tmp_path / "base", CHATML)
    run = {"tokenizer": "base/tokenizer.json"}
    first = opened(tmp_path, records, **run)
    (folder / "chat_template.jinja").write_text(CHATML_WITH_BLOCKS)
    second = opened(tmp_path, records, **run)
    assert second.summary.supervised == first.summary.supervised - 1, "the newline after an answer is no more learnt"
    third = opened(tmp_path, records * 2, **run)
    assert third.summary.samples == 2
    assert len({rows.fingerprint for rows in (first, second, third)}) == 3


def test_samples_that_change_after_their_hash_was_checked_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else this machine would learn other samples than the run's for as long as the rows are kept."""
    check = check_samples

    def replaced_after_check(paths: Sequence[Path], expected: str) -> None:
        check(paths, expected)
        for path in paths:
            path.write_text(path.read_text().replace("a", "b") + "\n")

    monkeypatch.setattr(sample_rows, "check_samples", replaced_after_check)
    with pytest.raises(DataError, match="has changed while it was read"):
        opened(tmp_path)
    assert not list((tmp_path / "cache").glob("index/*.json"))


@pytest.mark.parametrize("suffix", ["*.tokens", "index/*.json"])
def test_damaged_rows_are_made_again(tmp_path: Path, suffix: str) -> None:
    first = opened(tmp_path)
    (path,) = (tmp_path / "cache").glob(suffix)
    content = bytearray(path.read_bytes())
    place = content.index(b'"samples": 200') + 11 if suffix.endswith("json") else len(content) // 2
    content[place] ^= 1
    path.write_bytes(content)
    again = open_sample_rows(sample_run(), tmp_path / "cache", base=tmp_path)
    assert again.summary == first.summary and (again.batch([0, 1]) == first.batch([0, 1])).all()


def test_peers_with_the_same_samples_have_the_same_fingerprint_and_others_have_not(tmp_path: Path) -> None:
    one = opened(tmp_path, cache="one")
    assert opened(tmp_path, cache="other").fingerprint == one.fingerprint
    changed = [*RECORDS[:-1], {**RECORDS[-1], "completion": "z"}]
    assert opened(tmp_path, changed).fingerprint != one.fingerprint
    assert opened(tmp_path, RECORDS[::-1]).fingerprint != one.fingerprint


def test_the_fingerprint_is_pinned_because_peers_of_other_versions_compare_it(tmp_path: Path) -> None:
    assert opened(tmp_path, heldout=0.1).fingerprint == PINNED


# --- hashes and errors


def test_the_hashes_of_the_manifest_are_checked(tmp_path: Path) -> None:
    path = write_records(tmp_path / "samples.jsonl", RECORDS)
    hashes = {
        "samples_hash": hash_samples([path]),
        "tokenizer_hash": open_training_tokenizer("bytes", 500).fingerprint,
    }
    good = sample_run(**hashes)
    assert open_sample_rows(good, tmp_path / "cache", base=tmp_path).summary.samples == 200
    path.write_text(path.read_text().replace("x", "y"))
    with pytest.raises(
        DataError, match=f"has the SHA-256 {hash_samples([path])}, but .* with {hashes['samples_hash']} "
    ):
        open_sample_rows(good, tmp_path / "cache", base=tmp_path)
    with pytest.raises(
        DataError, match=r"The tokenizer of bytes, .* made with 1{64} \(\[data\] tokenizer_hash\); copy"
    ):
        open_sample_rows(sample_run(tokenizer_hash="1" * 64), tmp_path / "cache", base=tmp_path)


@pytest.mark.parametrize(
    ("records", "heldout", "says"),
    [
        (RECORDS[:1], 0.1, r"has 1 of the 2 samples .* at least; add samples or set \[data\] heldout = 0;"),
        ([{"prompt": "p" * 40, "completion": "c"}], 0.0, r"has 0 of the 1 .* \(1 have no supervised token in 31\);"),
        ([*RECORDS[:1], {"prompt": "p" * 40, "completion": "c"}], 0.1, r"raise \[model\] context or set"),
        ([{"prompt": "p", "completion": 3}], 0.0, r"samples\.jsonl:1: completion"),
        ([{"text": "p"}, {"txt": "p"}], 0.0, r"samples\.jsonl:2: column 'text' is missing"),
    ],
)
def test_what_is_wrong_in_the_samples_is_said_and_nothing_is_kept(
    tmp_path: Path, records: list[dict[str, Any]], heldout: float, says: str
) -> None:
    with pytest.raises(DataError, match=says):
        opened(tmp_path, records, heldout=heldout)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix in (".tokens", ".json")]


@pytest.mark.parametrize(
    ("record", "reading", "says"),
    [
        (
            {"prompt": "p" * 40, "completion": "c"},
            {"too_long": "drop"},
            r"3 are longer .* 31, .* drop\); raise \[model\]",
        ),
        ({"prompt": "p", "completion": "c", "train": False}, {}, r"3 are excluded by a column\); add samples"),
        ({"prompt": "p", "completion": "c", "label": False}, {}, r"3 are labelled bad\); add samples"),
        ({"prompt": "p", "completion": 3}, {"skip_bad": True}, r"3 are malformed\); add samples"),
    ],
)
def test_where_all_samples_are_left_out_the_reason_is_said(
    tmp_path: Path, record: dict[str, Any], reading: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        opened(
            tmp_path,
            [RECORDS[0] | ({"label": True} if "label" in record else {}), *[record] * 3],
            heldout=0.1,
            **reading,
        )


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"Cannot read .*samples\.jsonl \(No such file"):
        open_sample_rows(sample_run(), tmp_path / "cache", base=tmp_path)
    with pytest.raises(DiskError, match=r"has no tokenizer\.json"):
        opened(tmp_path, tokenizer="nowhere/tokenizer.json")
    with pytest.raises(ManifestError, match=r"is not a tokenizer\.json, beside which the chat template"):
        opened(tmp_path, tokenizer="my.json")
    with pytest.raises(ManifestError, match="has no samples"):
        open_sample_rows(sample_run("lm", samples=""), tmp_path / "cache", base=tmp_path)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "base")
    with pytest.raises(ManifestError, match=r"token id 399 but \[model\] vocabulary is 300; use vocabulary = 400"):
        open_training_tokenizer("base", 300, tmp_path)
    assert open_training_tokenizer("base/tokenizer.json", 500, tmp_path).name == str(tmp_path / "base")


def test_an_id_beyond_the_vocabulary_is_refused() -> None:
    builder = RowBuilder("x.jsonl", "sft", 8, 256, ReadingCounts(), seed=0, heldout=0.0)
    odd = TokenSequence(np.array([1, 300], np.int32), np.array([False, True]), np.zeros((2, 2), np.int32), "", 0)
    with pytest.raises(DataError, match=r"gave x\.jsonl token id 300 but says that its vocabulary is 256"):
        list(builder.iter_arrays([(odd,)]))


def test_a_summary_survives_json() -> None:
    summary = RowSummary(((3, 1), (2, 0)), "ab", 9, 2, 1, 0, 50, 20)
    assert RowSummary.from_details(json.loads(json.dumps(summary.to_details()))) == summary
    assert (summary.rows, summary.heldout_rows, summary.trained) == (5, 1, 6)
    assert replace(summary, chunks=()).rows == 0


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=2, max_size=60),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 99),
)
def test_rows_of_any_lengths_are_unpacked_to_what_was_packed(
    shapes: list[tuple[int, int]], heldout: float, seed: int
) -> None:
    context = 31
    made = [
        TokenSequence(
            np.arange(1, n + 1, dtype=np.int32), np.arange(n) >= max(1, first), np.zeros((0, 2), np.int32), "", 0
        )
        for n, first in ((min(n, context + 1), first) for n, first in shapes)
    ]
    learnt = [each for each in made if each.supervised.any()]
    builder = RowBuilder("x", "sft", context, 256, ReadingCounts(), seed=seed, heldout=heldout)
    if len(learnt) < (2 if heldout else 1):
        with pytest.raises(DataError):
            list(builder.iter_arrays((each,) for each in made))
        return
    values = np.concatenate(list(builder.iter_arrays((each,) for each in made)))
    rows = SampleRows(values, builder.summary(), context, 1, seed)
    found = samples_of([*training_rows(rows), *heldout_rows(rows)])
    assert Counter(found) == Counter((tuple(each.ids.tolist()), tuple(each.supervised.tolist())) for each in learnt)
