"""What an origin trains on: the run's corpus or samples, read from this machine with its owner's permission."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from agora_protocol.errors import LocalError
from agora_protocol.ids import PeerId
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import ADAPTER_FILE, HfSection
from agora_protocol.manifest_sections import DataSection

from agora.core.tasks import run_in_thread
from agora.data.corpus import open_corpus_parts
from agora.data.local_files import LocalFiles
from agora.data.sampling import CorpusMicrobatches, Sampler
from agora.data.tokenizer import BYTES, Tokenizer, open_tokenizer
from agora.model import family_of
from agora.node import daemon_registry, run_files
from agora.node.daemon_context import DaemonContext
from agora.node.peer.local_peer import LocalPeer
from agora.tuning.adapters.peft_folder import check_adapter, not_from_an_adapter
from agora.tuning.base.store import BaseModelError
from agora.tuning.chat.sample_rows import SampleRows, open_sample_rows
from agora.tuning.epochs.batches import EpochFile

# Times that a run sees its data from which on its founder is warned: people tune for 1 to 5, pretrain for fewer.
MANY_EPOCHS: Final = 20.0


class FilesNotAllowed(LocalError):
    """Raised where a manifest of somebody else reads files of this machine, without allow_files."""

    code: ClassVar[str] = "files-not-allowed"


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples that an origin draws from, epoch by epoch, and the states of the epochs on disk, by step."""

    rows: SampleRows
    epoch_file: EpochFile


OriginData = CorpusMicrobatches | Samples


async def open_training_data(local_peer: LocalPeer) -> OriginData:
    """Opens what the run's origins train on: Samples, or CorpusMicrobatches of a corpus. May take long.

    Tokenises the data first, unless that is cached. It is a phase of the start, "samples" or "corpus".

    Raises LocalError for files that the owner did not allow to read, DataError for what is wrong in them, ManifestError
    and DiskError.
    """
    _require_permission(local_peer)
    if local_peer.manifest.has_marks:
        return await _open_samples(local_peer)
    return await _open_corpus(local_peer)


def _require_permission(local_peer: LocalPeer) -> None:
    context, data = local_peer.context, local_peer.manifest.data
    sources = list(data.sample_paths) or [source for source in data.corpus if source != "stdlib"]
    sources += [data.tokenizer] if data.tokenizer != "bytes" else []
    if sources and not context.settings.allow_files and not is_own_manifest(context, local_peer.signed.founder):
        raise FilesNotAllowed(
            f"The run reads files of this machine ({', '.join(sources[:3])}); "
            "look at them, then join with --allow-files."
        )


def is_own_manifest(context: DaemonContext, founder: PeerId) -> bool:
    """Returns whether this machine's owner has chosen what the manifest reads: by a draft of theirs, or as founder.

    A signed manifest that the owner has as a file may be a stranger's, just as one that came over the network.
    """
    if context.reference.file is None:
        return False
    if context.reference.draft is not None or founder == context.me:
        return True
    # Another daemon of this user founded the run: a second data directory on one machine.
    return any(entry.peer == founder == entry.founder for entry in daemon_registry.find_running_daemons())


def check_draft(context: DaemonContext, draft: Manifest) -> DataUse | None:
    """Reads what a manifest trains on before its founder signs it: what a start would refuse later is refused now.

    Returns how often its steps see the data; None if no data is read, because the founder's own `--stages` leave out
    stage 0. Blocks, and may take long; rows and tokens stay cached for the start. Raises what open_training_data
    raises, BaseModelError without the base model, and LocalError for a base model or data that the run has no use for.
    """
    settings = context.settings
    stored = context.home.root / "base" / getattr(draft.model, "tensors_hash", "")  # fetched for an earlier run
    if settings.named_base_model is not None or not stored.is_dir() or stored.name == "base":
        family_of(draft.model).check_machine(settings.named_base_model)
    _check_adapter(context, draft)
    is_queued = bool(settings.queue or context.queued or context.queue_done)  # what one run has no use for, another has
    if not is_queued and (unused := explain_unused(context, draft)):
        raise LocalError(f"{unused[0]}; leave it out, or make another manifest with `swarm new`. Nothing was signed.")
    if settings.span is not None and 0 not in settings.span:
        return None
    data = _localise(context, draft)
    if not draft.has_marks:
        _, tokens = _load_corpus(context, draft, data)
        return DataUse.of(draft, tokens * (1.0 - draft.data.heldout))
    summary = _load_samples(context, draft, data).summary
    is_dpo = draft.objective.kind == "dpo"  # each position of its rows counts
    return DataUse.of(draft, summary.rows * draft.model.context if is_dpo else summary.supervised)


@dataclass(frozen=True, slots=True)
class DataUse:
    """How often a run sees its data. step_epochs: in one step."""

    steps: int
    target_tokens: int
    epochs: float
    step_epochs: float

    @classmethod
    def of(cls, manifest: Manifest, trained_tokens: float) -> DataUse:
        """trained_tokens: how many tokens of the data count for `target_tokens`; held-out ones do not."""
        optimizer = manifest.optimizer
        step_epochs = optimizer.target_tokens / max(trained_tokens, 1.0)
        return cls(optimizer.total_steps, optimizer.target_tokens, optimizer.total_steps * step_epochs, step_epochs)

    def sentence(self) -> str:
        return f"its {self.steps:,} steps of {self.target_tokens:,} tokens see the data {format_times(self.epochs)}"

    def warning(self) -> str:
        """Returns what the founder should know before it signs; "" if the run sees its data a usual number of times."""
        if self.step_epochs > 1.0:
            problem = f"a single step sees it {format_times(self.step_epochs)}"
        elif self.epochs > MANY_EPOCHS:
            problem = f"after some {MANY_EPOCHS:.0f} times a model learns it by heart"
        else:
            return ""
        return (
            f"the data is little for this run: {self.sentence()}, and {problem}. If that is not meant, end this daemon "
            "and make another manifest, with smaller total_steps or target_tokens in [optimizer]"
        )


def format_times(epochs: float) -> str:
    """Returns how often, in words: "once", "0.25 times", "1,300 times"."""
    if epochs == 1.0:
        return "once"
    return f"{epochs:,.0f} times" if epochs >= 100.0 else f"{epochs:.3g} times"


def explain_unused(context: DaemonContext, manifest: Manifest) -> list[str]:
    """Returns a sentence, without a full stop, for each file that the owner names and the run has no use for."""
    settings, files = context.settings, _local_files(context)
    unused = []
    is_from_base = isinstance(manifest.model, HfSection) or files.needs_base_model(manifest.data)
    if settings.named_base_model is not None and not is_from_base:
        unused.append(f"--base-model {settings.base_model} has no effect: {manifest.name} begins with no base model")
    for place in files.unused_places(manifest.data):
        unused.append(f"--data {place} has no effect: {manifest.name} trains on other text, which its [data] names")
    return unused


def _check_adapter(context: DaemonContext, draft: Manifest) -> None:
    named, model = context.settings.named_adapter, draft.model
    if named is not None:
        if not isinstance(model, HfSection):
            raise BaseModelError(not_from_an_adapter(named))
        check_adapter(model, named)
        return
    if isinstance(model, HfSection) and model.adapter_hash:
        # A start of before has kept it there.
        if (context.home.base_model(model.tensors_hash) / ADAPTER_FILE).is_file():
            return
        raise BaseModelError("The run goes on from an adapter; name the folder that has it: --adapter DIR.")


def _load_corpus(context: DaemonContext, manifest: Manifest, data: DataSection) -> tuple[Sampler, int]:
    base = context.reference.base
    tokenizer = open_tokenizer(data.tokenizer, manifest.model.vocabulary, base=base)
    corpus, ends = open_corpus_parts(data.corpus, tokenizer, _cache_folder(context), base=base)
    return Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed, ends), len(corpus)


def _load_samples(context: DaemonContext, manifest: Manifest, data: DataSection) -> SampleRows:
    local = manifest.model_copy(update={"data": data})
    return open_sample_rows(local, _cache_folder(context), base=context.reference.base)


def open_run_tokenizer(context: DaemonContext, manifest: Manifest) -> Tokenizer:
    """Returns the run's tokenizer from the files of this machine. Raises LocalError, DiskError or ManifestError."""
    source = _localise(context, manifest).tokenizer
    return open_tokenizer(source, manifest.model.vocabulary, base=context.reference.base)


async def _open_corpus(local_peer: LocalPeer) -> CorpusMicrobatches:
    context, manifest = local_peer.context, local_peer.manifest
    with context.phases.enter("corpus") as note:
        sampler, count = await run_in_thread(lambda: _load_corpus(context, manifest, _localise(context, manifest)))
        note.text = f"{count:,} tokens"
    drawn_file = context.home.manifest(manifest.run_id).with_name("drawn.txt")
    return CorpusMicrobatches(sampler, context.me, manifest.schedule.microbatch, drawn_file, context.report_event)


async def _open_samples(local_peer: LocalPeer) -> Samples:
    context, manifest = local_peer.context, local_peer.manifest
    with context.phases.enter("samples") as note:
        rows = await run_in_thread(lambda: _load_samples(context, manifest, _localise(context, manifest)))
        summary = rows.summary
        note.text = summary.sentence()
    path = context.home.manifest(manifest.run_id).with_name("epochs.json")
    return Samples(rows, EpochFile(path, context.report_event))


def _localise(context: DaemonContext, manifest: Manifest) -> DataSection:
    return _local_files(context).localise(manifest.data)


def _local_files(context: DaemonContext) -> LocalFiles:
    return LocalFiles(context.settings.data_places, context.reference.base, context.settings.named_base_model)


def remember_files(context: DaemonContext, manifest: Manifest) -> None:
    """Notes in the data directory where the tokenizer and the base model lie, also for a peer that trains on no text:
    an export on this machine needs them, whichever stages its daemon has held.
    """
    with suppress(OSError):
        tokenizer = None
        if manifest.data.tokenizer != BYTES:
            with suppress(LocalError):
                tokenizer = Path(_local_files(context).find_tokenizer(manifest.data.tokenizer))
        known = run_files.KnownFiles(tokenizer, context.settings.named_base_model)
        run_files.remember_files(context.home, manifest.run_id, known)


def _cache_folder(context: DaemonContext) -> Path:
    return Path(context.settings.corpus_cache or context.home.root / "corpus")
