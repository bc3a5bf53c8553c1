"""Replicas of one small model that agree in a given way, in one process: what loss they reach, and at how many bytes.

Knows: the trainer, the pure functions of averaging, the corpus. Must not know: other settings, networks, clocks. A
round is what the daemons make of it: snapshots of a slice, encoded with the common dither, averaged, the difference
sent back and added `delay` steps later, or the gradient of an exact step, whose average is sent back; a round of
weights that is due while one is under way is skipped.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from agora_protocol.ids import MicrobatchId, PeerId, RunId, Span
from agora_protocol.manifest import Manifest
from torch import Tensor

from agora.averaging.kinds import Part, RoundConfig, round_kinds
from agora.averaging.partition import Slices, cut_into_parts
from agora.averaging.wire import WireName
from agora.data.corpus import open_corpus
from agora.data.sampling import Sampler, sample_id
from agora.data.tokenizer import ByteTokenizer
from agora.stepping import EVERY_STEP, StepPolicy
from agora.train.span_trainer import SpanTrainer
from agora.train.stage_replica import Blocks
from benchmarks.agreement_settings import REPLICAS, Setting
from benchmarks.worker import Channel

WHOLE: Final = Span(0, 0)
What = Literal["weights", "gradient"]


class Replica:
    """One of the replicas: the whole model as one stage, its own optimizer, its own samples."""

    def __init__(self, manifest: Manifest, sampler: Sampler, name: str) -> None:
        self.trainer = SpanTrainer(manifest, WHOLE, torch.device("cpu"), report=lambda event: None, in_flight=1)
        self.stage = self.trainer.stage(0)
        self.tokens = manifest.tokens_per_microbatch
        self.step_alone()
        self._sequences = manifest.schedule.microbatch
        self._sampler, self._name = sampler, PeerId(name)

    @property
    def flat(self) -> Tensor:
        """All weights, float32 [numel]."""
        return self.stage.weights.current.flat

    def step_alone(self) -> None:
        """From now on it steps after each of its own microbatches."""
        self.trainer.stage(0).policy = StepPolicy(self.tokens)

    def step_together(self) -> None:
        """From now on it waits for the mean gradient of all replicas."""
        self.trainer.stage(0).policy = StepPolicy(self.tokens, exact_steps=EVERY_STEP)

    def draw(self, step: int) -> Tensor:
        """Returns this replica's samples of a step, token ids [b, s + 1]."""
        first = step * self._sequences
        ids = [sample_id(self._name, counter) for counter in range(first, first + self._sequences)]
        return torch.from_numpy(self._sampler.batch(ids)).long()

    def learn(self, step: int, tokens: Tensor) -> None:
        """Adds the gradient of token ids [b, s + 1], and takes the step unless all step together."""
        self.trainer.finish(_microbatch(step), 0, _inputs(tokens), tokens, train=True)
        self.trainer.take_due_steps()

    def loss(self, heldout: Sequence[Tensor]) -> float:
        """Returns the mean loss per token of batches [b, s + 1], in nats."""
        sums = [self.trainer.finish(_microbatch(0), 0, _inputs(tokens), tokens, train=False)[:2] for tokens in heldout]
        return sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)


class Agreement(Protocol):
    """A way for replicas to agree; called after every step of all replicas."""

    @property
    def bytes_each(self) -> float:
        """Bytes that each replica has sent so far."""

    @property
    def rounds(self) -> int:
        """Number of rounds so far."""

    def after(self, step: int) -> None:
        """Lets the replicas agree after all have taken `step` steps, or computed its gradients."""


class NoAgreement:
    """No agreement: every replica trains alone."""

    bytes_each, rounds = 0.0, 0

    def after(self, step: int) -> None:
        """See Agreement."""


class Exact:
    """Every step is along the mean gradient of all replicas, which travels in the dtype `wire`."""

    def __init__(self, replicas: Sequence[Replica], wire: WireName) -> None:
        self.bytes_each, self.rounds = 0.0, 0
        self._replicas = replicas
        self._terms = terms_of(wire)
        for replica in replicas:
            replica.step_together()

    def end(self) -> None:
        """Lets every replica take its own steps from now on."""
        for replica in self._replicas:
            replica.step_alone()

    def after(self, step: int) -> None:
        """See Agreement."""
        means = [replica.stage.take_mean_gradient() for replica in self._replicas]
        weights = [float(mean.tokens) for mean in means]
        found, sent = exchange([mean.values for mean in means], weights, self._terms, step, "gradient")
        for replica, mean in zip(self._replicas, found, strict=True):
            replica.stage.step_with_gradient(step - 1, mean, int(sum(weights)))
        self.bytes_each += sent
        self.rounds += 1


def terms_of(wire: WireName) -> RoundConfig:
    """What replicas of a manifest with this `averaging.wire` agree on; nothing here has a deadline."""
    return RoundConfig(PeerId("bench"), RunId("0" * 64), "mean", wire, round_s=math.inf, max_weight=math.inf)


def exchange(
    values: Sequence[Tensor], weights: Sequence[float], terms: RoundConfig, number: int, what: What
) -> tuple[list[Tensor], int]:
    """A round: what each member is answered, float32 [n], as RoundResult has it, and the bytes that each has put in."""
    answers = [torch.empty_like(value) for value in values]
    kind, sent = round_kinds(terms)[what], 0
    for index, cut in enumerate(cut_into_parts(len(values[0]))):
        part = Part(0, what, number, index)
        wired = [terms.encode(part, value[cut]) for value in values]
        came = [terms.decode(part, tensors, len(values[0][cut])) for tensors in wired]
        found = kind.combine(part, came, list(weights), None)
        assert found is not None
        for answer, value in zip(answers, came, strict=True):
            answer[cut] = kind.decode_answer(part, kind.encode_answer(found, value), len(value))
        sent += sum(tensor.nbytes for tensor in wired[0])
    return answers, sent


@dataclass(frozen=True, slots=True)
class Flight:
    """A round under way: the snapshots, and what each replica adds at step `lands`."""

    lands: int
    blocks: Blocks
    snapshots: list[Tensor]
    deltas: list[Tensor]


class Averaging:
    """Replicas average a slice of their weights every so many steps."""

    def __init__(self, setting: Setting, replicas: Sequence[Replica], seed: int) -> None:
        self.bytes_each, self.rounds = 0.0, 0
        self._setting, self._replicas = setting, replicas
        self._slices = Slices(len(replicas[0].flat), setting.fraction, seed)
        self._terms = terms_of(setting.wire)
        self._flight: Flight | None = None

    def after(self, step: int) -> None:
        """See Agreement."""
        self._land(step)
        if step % self._setting.every == 0 and self._flight is None:
            self._flight = self._take_off(step)
            self._land(step)

    def _take_off(self, step: int) -> Flight:
        number = step // self._setting.every
        blocks = self._slices.blocks(number)
        snapshots = [replica.stage.snapshot_blocks(blocks)[0] for replica in self._replicas]
        weights = [float(replica.tokens) for replica in self._replicas]
        deltas, sent = exchange(snapshots, weights, self._terms, number, "weights")
        self.bytes_each += sent
        self.rounds += 1
        return Flight(step + self._setting.delay, blocks, snapshots, deltas)

    def _land(self, step: int) -> None:
        flight = self._flight
        if flight is None or step < flight.lands:
            return
        for replica, snapshot, delta in zip(self._replicas, flight.snapshots, flight.deltas, strict=True):
            replica.stage.apply_average(flight.blocks, delta, snapshot, self._setting.rule)
        self._flight = None


class ExactAtFirst:
    """Replicas step along their mean gradient for some steps, and agree in another way after them."""

    def __init__(self, steps: int, first: Exact, later: Agreement) -> None:
        self._steps, self._first, self._later = steps, first, later

    @property
    def bytes_each(self) -> float:
        """See Agreement."""
        return self._first.bytes_each + self._later.bytes_each

    @property
    def rounds(self) -> int:
        """See Agreement."""
        return self._first.rounds + self._later.rounds

    def after(self, step: int) -> None:
        """See Agreement."""
        if step > self._steps:
            self._later.after(step)
            return
        self._first.after(step)
        if step == self._steps:
            self._first.end()


def train(manifest: Manifest, sampler: Sampler, setting: Setting, steps: int, heldout: int) -> dict[str, float]:
    """Trains REPLICAS replicas; returns losses over `heldout` batches, their distance, bytes and rounds."""
    replicas = [Replica(manifest, sampler, f"replica {number}") for number in range(REPLICAS)]
    agreement = agree(setting, replicas, manifest.seed)
    for step in range(steps):
        for replica in replicas:
            replica.learn(step, replica.draw(step))
        agreement.after(step + 1)
    batches = sampler.heldout_batches(manifest.schedule.microbatch, heldout)
    found = judge(replicas, [torch.from_numpy(batch).long() for batch in batches])
    return {**found, "bytes": agreement.bytes_each / len(replicas[0].flat) / steps, "rounds": agreement.rounds}


def judge(replicas: Sequence[Replica], heldout: Sequence[Tensor]) -> dict[str, float]:
    """Returns the losses of the replicas and of their mean, and their root mean square distance / that of the mean.

    The first replica holds the mean afterwards.
    """
    alone = [replica.loss(heldout) for replica in replicas]
    mean = torch.stack([replica.flat for replica in replicas]).mean(dim=0)
    distance = statistics.fmean(float((replica.flat - mean).square().mean()) for replica in replicas) ** 0.5
    apart = distance / float(mean.square().mean()) ** 0.5
    replicas[0].stage.writable_weights().copy_(mean)
    return {"loss_of_mean": replicas[0].loss(heldout), "loss_of_replica": statistics.fmean(alone), "apart": apart}


def agree(setting: Setting, replicas: Sequence[Replica], seed: int) -> Agreement:
    """Returns the way to agree that a setting names."""
    if setting.scheme == "synchronous":
        return Exact(replicas, "float32")
    later: Agreement = NoAgreement() if setting.scheme == "none" else Averaging(setting, replicas, seed)
    return ExactAtFirst(setting.exact, Exact(replicas, setting.wire), later) if setting.exact else later


def serve(spec: dict[str, Any], channel: Channel) -> None:
    """{"setting": {...}, "seed": n} trains and answers with what `train` found."""
    torch.set_num_threads(int(spec["threads"]))
    plain = Manifest.from_toml(spec["manifest"], "the benchmark's manifest")
    corpus = open_corpus(plain.data.corpus, ByteTokenizer(), Path(spec["cache"]))
    for order in channel.orders():
        manifest = plain.replaced(seed=order["seed"])
        sampler = Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed)
        setting = Setting(**order["setting"])
        channel.say(train(manifest, sampler, setting, int(spec["steps"]), int(spec["heldout"])))


def _inputs(tokens: Tensor) -> Tensor:
    """Returns the inputs of token ids [b, s + 1]: all but the last, [b, s]."""
    return tokens[:, :-1].contiguous()


def _microbatch(number: int) -> MicrobatchId:
    return MicrobatchId(number.to_bytes(16, "big"))
