"""What a sample id draws is pure, uniform and never held out."""

from __future__ import annotations

import subprocess
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from agora_protocol.errors import ManifestError
from agora_protocol.ids import PeerId

from agora.codec import decode_tokens
from agora.data.draws import splitmix64
from agora.data.sampling import CorpusMicrobatches, Sampler, sample_id
from agora.data.tokenizer import Ids
from agora.observe.events import TaskFailed

CONTEXT = 8


def counting(windows: int) -> Ids:
    """A corpus whose token i is i, so that a sample shows where it came from."""
    return np.arange(windows * CONTEXT + 1, dtype=np.uint32)


def sampler(windows: int = 5000, heldout: float = 0.1, seed: int = 3) -> Sampler:
    return Sampler(counting(windows), CONTEXT, heldout, seed)


def window_of(batch: np.ndarray) -> np.ndarray:
    assert (np.diff(batch, axis=1) == 1).all()
    assert (batch[:, 0] % CONTEXT == 0).all()
    return batch[:, 0] // CONTEXT


def test_a_batch_is_its_samples_int32_and_in_order() -> None:
    drawn = sampler()
    ids = [7, 2**64 - 1, 0, 7]
    batch = drawn.batch(ids)
    assert batch.dtype == np.int32 and batch.shape == (4, CONTEXT + 1)
    for row, one in zip(batch, ids, strict=True):
        assert np.array_equal(row, drawn.batch([one])[0])
    assert np.array_equal(batch, sampler().batch(np.array(ids, np.uint64)))
    assert np.array_equal(sampler().batch(range(5, 8)), sampler().batch([5, 6, 7]))


def test_other_seeds_draw_other_windows_and_hold_out_others() -> None:
    one, other = sampler(seed=1), sampler(seed=2)
    ids = np.arange(200)
    assert (window_of(one.batch(ids)) == window_of(other.batch(ids))).mean() < 0.05
    assert set(one.heldout_windows()) != set(other.heldout_windows())


def test_no_sample_is_held_out_and_together_they_cover_the_rest() -> None:
    drawn = sampler(windows=300, heldout=0.2)
    held = set(drawn.heldout_windows().tolist())
    trained = set(window_of(drawn.batch(np.arange(20_000))).tolist())
    assert not held & trained
    assert held | trained == set(range(300))
    assert drawn.is_held_out(np.array(sorted(held))).all()


def test_no_held_out_target_is_a_target_of_training() -> None:
    drawn = sampler(windows=300, heldout=0.2)
    trained = set(drawn.batch(np.arange(20_000))[:, 1:].ravel().tolist())
    held = {token for batch in drawn.heldout_batches(4) for token in batch[:, 1:].ravel().tolist()}
    assert held and not held & trained


def test_the_held_out_share_is_as_asked() -> None:
    for share in (0.01, 0.1, 0.5):
        held = len(sampler(windows=50_000, heldout=share).heldout_windows()) / 50_000
        assert held == pytest.approx(share, rel=0.1)
    assert len(sampler(heldout=0.0).heldout_windows()) == 0


def test_draws_are_uniform() -> None:
    drawn = sampler(windows=100, heldout=0.1)
    kept = 100 - len(drawn.heldout_windows())
    ids = np.array([sample_id(PeerId(f"peer{k % 7}"), k) for k in range(20_000)], np.uint64)
    for counts in (
        np.bincount(window_of(drawn.batch(ids)), minlength=100),
        np.bincount(window_of(drawn.batch(np.arange(20_000))), minlength=100),
    ):
        seen = counts[counts > 0]
        assert len(seen) == kept
        chi_squared = ((seen - 20_000 / kept) ** 2 / (20_000 / kept)).sum()
        assert chi_squared < kept + 5 * (2 * kept) ** 0.5


def test_origins_draw_apart_without_talking() -> None:
    ids = {sample_id(PeerId(f"12D3KooW{origin}"), counter) for origin in range(50) for counter in range(50)}
    assert len(ids) == 2500
    assert all(0 <= one < 2**64 for one in ids)
    assert sample_id(PeerId("ab"), 1) != sample_id(PeerId("a"), 11)


def test_the_draws_are_pinned() -> None:
    """Every peer of a run must draw the same for an id; if this fails, runs made before have changed."""
    assert sample_id(PeerId("12D3KooWA"), 5) == 6368663174667418858
    assert splitmix64(np.zeros(1, np.uint64), 0).tolist() == [0xE220A8397B1DCDAF], "splitmix64's published first output"
    assert splitmix64(np.arange(2, dtype=np.uint64), 1).tolist() == [10451216379200822465, 13757245211066428519]
    assert sampler().windows_of([0, 1, 2, 2**64 - 1]).tolist() == [3379, 1732, 2136, 1693]
    assert sampler().heldout_windows()[:4].tolist() == [2711, 4360, 1218, 2502]


def test_another_process_draws_the_same() -> None:
    code = (
        "import numpy as np; from agora.data.sampling import Sampler;"
        "print(Sampler(np.arange(40001), 8, 0.1, 3).windows_of(range(20)).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(sampler().windows_of(range(20)).tolist())


def test_held_out_batches_are_full_fixed_and_spread() -> None:
    drawn = sampler(windows=5000, heldout=0.1)
    batches = list(drawn.heldout_batches(8, limit=5))
    assert len(batches) == 5
    assert all(batch.shape == (8, CONTEXT + 1) and batch.dtype == np.int32 for batch in batches)
    assert all(np.array_equal(a, b) for a, b in zip(batches, drawn.heldout_batches(8), strict=False))
    windows = np.concatenate([window_of(batch) for batch in batches])
    assert len(set(windows.tolist())) == 40
    assert windows.min() < 1000 and windows.max() > 4000
    assert sum(1 for _ in drawn.heldout_batches(8)) == len(drawn.heldout_windows()) // 8


def test_few_held_out_windows_are_repeated_to_fill_a_batch() -> None:
    drawn = sampler(windows=10, heldout=0.01)
    (batch,) = drawn.heldout_batches(4)
    assert batch.shape == (4, CONTEXT + 1)
    assert set(window_of(batch).tolist()) == set(drawn.heldout_windows().tolist())


@pytest.mark.parametrize("seed", range(20))
def test_the_smallest_corpus_still_has_both_sides(seed: int) -> None:
    for heldout in (1e-9, 0.01, 0.5):
        drawn = sampler(windows=2, heldout=heldout, seed=seed)
        assert len(drawn.heldout_windows()) == 1
        assert set(window_of(drawn.batch(range(10))).tolist()) == {0, 1} - set(drawn.heldout_windows().tolist())


def test_a_corpus_below_two_windows_says_what_is_needed() -> None:
    corpus = np.arange(2 * CONTEXT, dtype=np.uint8)
    with pytest.raises(ManifestError, match=r"has 16 tokens but \[model\] context 8 needs at least 17; add text"):
        Sampler(corpus, CONTEXT, 0.01, 0)
    assert Sampler(corpus, CONTEXT, 0.0, 0).batch([0])[0].tolist() == list(range(9))


def test_large_corpora_are_split_without_looking_at_every_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agora.data.sampling.SCANNED_WINDOWS", 1000)
    drawn = sampler(windows=5500, heldout=0.1)
    held = drawn.heldout_windows()
    assert 50 < len(held) < 150 and drawn.is_held_out(held).all() and (held % 6 == 0).all()
    assert not drawn.is_held_out(window_of(drawn.batch(np.arange(5000)))).any()


def batches(folder: Path, reported: list[object]) -> CorpusMicrobatches:
    """An origin's microbatches, of which numbers are reserved in `folder`."""
    return CorpusMicrobatches(sampler(), PeerId("QmOrigin"), 2, folder / "drawn", reported.append)


def test_numbers_go_on_after_a_restart_and_a_file_that_is_spoilt_is_reported(tmp_path: Path) -> None:
    reported: list[object] = []
    first = batches(tmp_path, reported).draw().number
    second = batches(tmp_path, reported).draw().number
    assert first == 0 and second > first and not reported, "a first start has no file"
    (tmp_path / "drawn").write_text("many")
    assert batches(tmp_path, reported).draw().number == 0
    assert [type(event) for event in reported] == [TaskFailed]


def mixture(ends: Sequence[int], heldout: float = 0.1) -> Sampler:
    return Sampler(counting(1000), CONTEXT, heldout, 3, ends)


def source_of(made: Sampler, ids: Sequence[int], weights: Sequence[float], ends: Sequence[int]) -> list[int]:
    windows = made.windows_of(ids, weights)
    assert not made.is_held_out(windows).any()
    return [bisect_right(ends, int(window) * CONTEXT) for window in windows]


def test_each_source_is_drawn_as_often_as_its_weight_says_and_never_what_is_held_out() -> None:
    ends = (CONTEXT * 600 + 3, CONTEXT * 900, CONTEXT * 1000 + 1)
    made, ids = mixture(ends), range(20_000)
    for weights in ((1.0, 1.0, 2.0), (0.0, 0.0, 5.0), (0.3, 0.0, 0.1)):
        counts = Counter(source_of(made, ids, weights, ends))
        for source, weight in enumerate(weights):
            assert counts[source] / len(ids) == pytest.approx(weight / sum(weights), abs=0.02)


def test_without_weights_a_corpus_of_several_sources_is_drawn_as_one() -> None:
    ends = (CONTEXT * 600, CONTEXT * 1000 + 1)
    assert mixture(ends).windows_of(range(500)).tolist() == mixture(()).windows_of(range(500)).tolist()
    assert sorted(mixture(ends).heldout_windows()) == sorted(mixture(()).heldout_windows())
    counts = Counter(source_of(mixture(ends), range(20_000), (), ends))
    assert counts[0] / 20_000 == pytest.approx(0.6, abs=0.02)


def test_a_source_without_a_window_to_train_on_is_not_drawn() -> None:
    ends = (CONTEXT * 1000 - 2, CONTEXT * 1000, CONTEXT * 1000 + 1)
    assert set(source_of(mixture(ends), range(100), (1.0, 1.0, 1.0), ends)) == {0}
    assert set(source_of(mixture(ends), range(100), (0.0, 1.0, 1.0), ends)) == {0}, "nothing else is left"


def test_an_origin_draws_by_the_weights_of_the_moment(tmp_path: Path) -> None:
    ends = (CONTEXT * 500, CONTEXT * 1000 + 1)
    batches = CorpusMicrobatches(mixture(ends), PeerId("QmOrigin"), 4, tmp_path / "drawn", lambda event: None)
    drawn = []
    for weights in ((1.0, 0.0), (0.0, 1.0)):
        batches.weights = lambda weights=weights: weights
        tokens = decode_tokens(batches.draw().tokens, len(counting(1000)))
        drawn.append({bisect_right(ends, int(row[0])) for row in tokens})
    assert drawn == [{0}, {1}]
