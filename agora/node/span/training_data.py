"""Opens what the origin of this peer trains on: windows of a corpus, or the rows of samples, epoch by epoch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agora_protocol.errors import LocalError
from agora_protocol.ids import PeerId

from agora.core.threads import run_in_thread
from agora.data.corpus import open_corpus
from agora.data.sampling import OriginBatches, Sampler
from agora.data.tokenizer import open_tokenizer
from agora.node.peer.local_peer import LocalPeer
from agora.tuning.chat.sample_rows import SampleRows, open_sample_rows
from agora.tuning.epochs.batches import EpochBatches
from agora.tuning.epochs.epoch_record import EpochRecord


@dataclass
class OtherOrigins:
    """Holds a function: `peers()` returns the other live origins of the run; none until the loaded span sets it."""

    peers: Callable[[], Collection[PeerId]] = tuple


@dataclass(frozen=True, slots=True)
class Epochs:
    """What an origin on samples needs for its epochs.

    batches: draws its microbatches. record: the states of the epochs on disk, by step. other_origins: the other peers
    that draw samples.
    """

    batches: EpochBatches
    record: EpochRecord
    other_origins: OtherOrigins

    def resume(self, step: int) -> None:
        """Restores the state of the epochs that was recorded at `step` of stage 0, or at the newest step before it.

        Does nothing without such a record, or with a malformed one: the first epoch begins. Raises DataError if the
        record is of a different data set.
        """
        if (state := self.record.latest_up_to(step)) is not None:
            with suppress(ValueError):
                self.batches.shares.restore(state)


OriginData = OriginBatches | Epochs


async def open_training_data(local_peer: LocalPeer) -> OriginData:
    """Opens what the run's origins train on: an Epochs for samples, else OriginBatches of a corpus. May take long.

    Tokenises the data first, unless that is cached. It is a step of the start, "samples" or "corpus". Raises LocalError
    for files that the owner did not allow to read, DataError for what is wrong in them, ManifestError and DiskError.
    """
    _require_permission(local_peer)
    if local_peer.manifest.has_marks:
        return await _open_samples(local_peer)
    return await _open_corpus(local_peer)


def _require_permission(local_peer: LocalPeer) -> None:
    startup, data = local_peer.startup, local_peer.manifest.data
    sources = [data.samples] if data.samples else [source for source in data.corpus if source != "stdlib"]
    sources += [data.tokenizer] if data.tokenizer != "bytes" else []
    if startup.reference.file is None and sources and not startup.settings.allow_files:
        raise LocalError(
            f"the run reads files of this machine ({', '.join(sources[:3])}); "
            "look at them, then join with --allow-files"
        )


def _cache_folder(local_peer: LocalPeer) -> Path:
    startup = local_peer.startup
    return Path(startup.settings.corpus_cache or startup.home.root / "corpus")


async def _open_corpus(local_peer: LocalPeer) -> OriginBatches:
    startup, manifest, base = local_peer.startup, local_peer.manifest, local_peer.startup.reference.base

    def load() -> tuple[Sampler, int]:
        tokenizer = open_tokenizer(manifest.data.tokenizer, manifest.model.vocabulary, base=base)
        corpus = open_corpus(manifest.data.corpus, tokenizer, _cache_folder(local_peer), base=base)
        sampler = Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed)
        return sampler, len(corpus)

    with startup.steps.step("corpus") as note:
        sampler, count = await run_in_thread(load)
        note.text = f"{count:,} tokens"
    drawn_file = startup.home.manifest(manifest.run_id).with_name("drawn.txt")
    return OriginBatches(sampler, startup.me, manifest.schedule.microbatch, drawn_file, startup.report_event)


async def _open_samples(local_peer: LocalPeer) -> Epochs:
    startup, manifest = local_peer.startup, local_peer.manifest

    def load() -> SampleRows:
        return open_sample_rows(manifest, _cache_folder(local_peer), base=startup.reference.base)

    with startup.steps.step("samples") as note:
        rows = await run_in_thread(load)
        summary = rows.summary
        note.text = (
            f"{summary.trained:,} samples in {summary.rows:,} rows, {summary.supervised:,} supervised tokens; "
            f"{summary.heldout:,} held out, {summary.truncated:,} cut, {summary.left_out:,} left out"
        )
    other_origins = OtherOrigins()
    session = int.from_bytes(os.urandom(8), "big") >> 1
    batches = EpochBatches(
        rows, manifest.seed, manifest.schedule.microbatch, startup.me, session, lambda: other_origins.peers()
    )
    path = startup.home.manifest(manifest.run_id).with_name("epochs.json")
    return Epochs(batches, EpochRecord(path, startup.report_event), other_origins)
