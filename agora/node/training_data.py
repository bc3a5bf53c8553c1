"""Opens what the origin of this peer trains on: windows of a corpus, or the rows of samples, epoch by epoch.

Knows: manifest, settings, places of files. Must not know: stages, what the pipeline does with microbatches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agora_protocol.errors import LocalError
from agora_protocol.ids import PeerId

from agora.data.corpus import open_corpus
from agora.data.epoch_batches import EpochBatches
from agora.data.sample_rows import SampleRows, open_sample_rows
from agora.data.sampling import OriginBatches, Sampler
from agora.data.tokenizer import open_tokenizer
from agora.node.local_peer import LocalPeer
from agora.state.epoch_record import EpochRecord
from agora.threads import run_in_thread


@dataclass
class OriginListing:
    """Holds `others`, which returns the other live origins of the run; the span sets it when it is loaded."""

    others: Callable[[], Collection[PeerId]] = tuple


@dataclass(frozen=True, slots=True)
class Epochs:
    """What an origin on samples needs for its epochs: its batches, the record of them on disk, the other origins."""

    batches: EpochBatches
    record: EpochRecord
    circle: OriginListing

    def resume(self, step: int) -> None:
        """Restores the state of the epochs that was recorded at `step` of stage 0, or at the newest step before it.

        Without such a record, or with a malformed one, the epoch starts over. Raises DataError
        if the record is of a different data set.
        """
        if (state := self.record.newest(step)) is not None:
            with suppress(ValueError):
                self.batches.shares.restore(state)


TrainingData = OriginBatches | Epochs


async def open_training_data(local_peer: LocalPeer) -> TrainingData:
    """Opens what the run's origin trains on: an Epochs for samples, else OriginBatches of a corpus.

    Raises LocalError for files that the owner did not allow to read, DataError for what is wrong in them, ManifestError
    and DiskError.
    """
    _require_permission(local_peer)
    if local_peer.manifest.has_marks:
        return await _open_samples(local_peer)
    return await _open_corpus(local_peer)


def _require_permission(local_peer: LocalPeer) -> None:
    """Raises LocalError if a run not joined from a local manifest file names local files, without --allow-files."""
    startup, data = local_peer.startup, local_peer.manifest.data
    sources = [data.samples] if data.samples else [source for source in data.corpus if source != "stdlib"]
    sources += [data.tokenizer] if data.tokenizer != "bytes" else []
    if startup.reference.file is None and sources and not startup.settings.allow_files:
        raise LocalError(
            f"the run reads files of this machine ({', '.join(sources[:3])}); "
            "look at them, then join with --allow-files"
        )


def _cache(local_peer: LocalPeer) -> Path:
    """Returns the folder in which corpora and rows are cached."""
    startup = local_peer.startup
    return Path(startup.settings.corpus_cache or startup.home.root / "corpus")


async def _open_corpus(local_peer: LocalPeer) -> OriginBatches:
    """Opens tokenizer and corpus in a thread, and returns the batches of windows that this origin draws from them."""
    startup, manifest, base = local_peer.startup, local_peer.manifest, local_peer.startup.reference.base

    def load() -> tuple[Sampler, int]:
        """Opens tokenizer and corpus, which may take long; returns the sampler and how many tokens there are."""
        tokenizer = open_tokenizer(manifest.data.tokenizer, manifest.model.vocabulary, base=base)
        corpus = open_corpus(manifest.data.corpus, tokenizer, _cache(local_peer), base=base)
        sampler = Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed)
        return sampler, len(corpus)

    with startup.steps.step("corpus") as note:
        sampler, count = await run_in_thread(load)
        note.text = f"{count:,} tokens"
    reserved = startup.home.manifest(manifest.run_id).with_name("drawn.txt")
    return OriginBatches(sampler, startup.me, manifest.schedule.microbatch, reserved, startup.report_event)


async def _open_samples(local_peer: LocalPeer) -> Epochs:
    """Opens the rows of the samples, in a thread, and returns what a new session draws from them.

    That is its batches, the record of the state of the epochs on this disk, and a circle of origins without any yet.
    """
    startup, manifest = local_peer.startup, local_peer.manifest

    def load() -> SampleRows:
        """Makes the rows, or opens those that this machine has made before."""
        return open_sample_rows(manifest, _cache(local_peer), base=startup.reference.base)

    with startup.steps.step("samples") as note:
        rows = await run_in_thread(load)
        found = rows.summary
        note.text = (
            f"{found.trained:,} samples in {found.rows:,} rows, {found.supervised:,} supervised tokens; "
            f"{found.heldout:,} held out, {found.truncated:,} cut, {found.left_out:,} left out"
        )
    circle = OriginListing()
    session = int.from_bytes(os.urandom(8), "big") >> 1
    batches = EpochBatches(
        rows, manifest.seed, manifest.schedule.microbatch, startup.me, session, lambda: circle.others()
    )
    path = startup.home.manifest(manifest.run_id).with_name("epochs.json")
    return Epochs(batches, EpochRecord(path, startup.report_event), circle)
