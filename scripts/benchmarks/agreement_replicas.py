"""Replicas of one small model that agree in a given way, in one process: what loss they reach, and at how many bytes.

A round does what it does between daemons: each member contributes its gradients of an all-reduce step, or a slice's
differences to the anchor, plus what was lost before; all get the mean in the same bytes, and apply that of a slice
`delay` steps later.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from agora_protocol.codec_names import NumberFormatName
from agora_protocol.ids import MicrobatchId, PeerId, RunId, Span
from agora_protocol.manifest import Manifest
from torch import Tensor

from agora.core.step_instructions import StepInstructions
from agora.core.step_schedule import ALL_REDUCE
from agora.data.corpus import open_corpus
from agora.data.sampling import Sampler, sample_id
from agora.data.tokenizer import ByteTokenizer
from agora.replica.reducers import ROUNDS_PER_REDUCER, FragmentDivision
from agora.replica.shard_codec import RoundConfig, RoundKind, Shard, ShardCodec, cut_into_shards
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.stage import Blocks
from agora.train.weight_versions import DecodedWork
from benchmarks.agreement_settings import Setting, sequences_of
from benchmarks.worker import Channel

WHOLE: Final = Span(0, 0)


class Replica:
    """One of the replicas: the whole model as one stage, its own optimizer, its own samples."""

    def __init__(self, manifest: Manifest, sampler: Sampler, name: str, sequences: int) -> None:
        self.trainer = SpanTrainer(manifest, WHOLE, torch.device("cpu"), report=lambda event: None, in_flight=1)
        self.stage = self.trainer.stages[0]
        self.tokens = sequences * manifest.model.context
        self.step_alone()
        self._sequences = sequences
        self._together = False
        self._sampler, self._name = sampler, PeerId(name)

    @property
    def flat(self) -> Tensor:
        return self.stage.weights.current.flat

    def step_alone(self) -> None:
        """Makes this replica step after each of its own microbatches from now on."""
        self._together = False
        self.stage.set_instructions(StepInstructions(self.tokens))

    def step_together(self) -> None:
        """Makes this replica wait for the mean gradient of all replicas from now on."""
        self._together = True

    def draw(self, step: int) -> Tensor:
        """Draws and returns this replica's samples of a step, token ids [b, s + 1]."""
        first = step * self._sequences
        ids = [sample_id(self._name, counter) for counter in range(first, first + self._sequences)]
        self._drawn, self._learnt = torch.from_numpy(self._sampler.batch(ids)).long(), 0
        return self._drawn

    def learn(self, step: int, share: float) -> None:
        """Adds the gradients of the drawn samples up to this share of them; after the last takes the step, or closes.

        When all replicas step together, the last part is closed, and no step is taken along it.
        """
        last = round(share * self._sequences)
        tokens, self._learnt = self._drawn[self._learnt : last], last
        if not len(tokens):
            return
        if self._together:
            self.stage.set_instructions(StepInstructions(self.tokens, True, step, self.tokens, closes_share=True))
        batch = _batch_of(tokens)
        self.trainer.run_last_stages(DecodedWork(_microbatch(step), 0, batch.inputs, batch, "train"))
        self.trainer.take_due_steps()

    def loss(self, heldout: Sequence[Tensor]) -> float:
        """Returns the mean loss per token of batches [b, s + 1], in nats."""
        batches = [_batch_of(tokens) for tokens in heldout]
        done = [
            self.trainer.run_last_stages(DecodedWork(_microbatch(0), 0, batch.inputs, batch, "evaluate"))
            for batch in batches
        ]
        return sum(one.loss_sum for one in done) / sum(one.tokens for one in done)


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
        """Lets the replicas agree after all have taken `step` steps, or computed its gradients."""


class Exact:
    """Every step is along the mean gradient of all replicas, which travels in the format `wire`.

    missing: the share of contributions, drawn at random by `seed`, that their reducers do not count.
    """

    def __init__(
        self, replicas: Sequence[Replica], wire: NumberFormatName, missing: float = 0.0, seed: int = 0
    ) -> None:
        self.bytes_each, self.rounds = 0.0, 0
        self._replicas = replicas
        self._in_time = InTime(missing, seed, len(replicas))
        self._members = members_of(len(replicas), gradient_wire=wire)
        for replica in replicas:
            replica.step_together()

    def after(self, step: int) -> None:
        """Lets the replicas agree after all have taken `step` steps, or computed its gradients."""
        shares = [replica.stage.close_share() for replica in self._replicas]
        values, weights = [share.values for share in shares], [float(share.tokens) for share in shares]
        in_time = self._in_time.draw()
        found, sent = exchange(values, weights, self._members, shares[0].step, "gradient", in_time)
        for replica, share, mean in zip(self._replicas, shares, found, strict=True):
            replica.stage.step_with_gradient(share.step, mean, int(sum(weights)))
        self.bytes_each += sent
        self.rounds += 1


class InTime:
    """Draws which contributions to a round come in time: all but a share `missing` of them, always at least one."""

    def __init__(self, missing: float, seed: int, members: int) -> None:
        self._missing, self._members, self._rng = missing, members, random.Random(seed)

    def draw(self) -> list[bool]:
        """Draws the next round's; returns for each member whether its contribution comes in time."""
        drawn = [self._rng.random() >= self._missing for _ in range(self._members)]
        return drawn if any(drawn) else [True] * self._members


class RoundMember:
    """A member's side of all rounds, as a daemon has it: the run's configuration, and what it exchanges."""

    def __init__(self, config: RoundConfig) -> None:
        self.config, self.averager = config, ShardCodec(config)


def members_of(
    count: int, gradient_wire: NumberFormatName = "float32", slice_wire: NumberFormatName = "float32"
) -> list[RoundMember]:
    """Makes members of a run whose manifest has these formats; nothing here has a deadline."""
    who = PeerId("bench"), RunId("0" * 64), "mean", math.inf, math.inf
    config = RoundConfig(*who, False, gradient_wire, slice_wire)  # type: ignore[arg-type]
    return [RoundMember(config) for _ in range(count)]


def exchange(
    values: Sequence[Tensor],
    weights: Sequence[float],
    members: Sequence[RoundMember],
    number: int,
    kind: RoundKind,
    in_time: Sequence[bool],
    slices: int = ALL_REDUCE,
) -> tuple[list[Tensor], int]:
    """Runs a round; returns what each member gets as the answer, float32 [n], and the bytes that each member sends.

    One member reduces all shards, for ROUNDS_PER_REDUCER rounds of the same elements; then the next member does.

    in_time: for each member, whether its values count. slices: of the stage, ALL_REDUCE in a round of gradients.
    """
    answers = [torch.empty_like(value) for value in values]
    decoder, sent = members[0].averager, 0
    turn = number // max(slices, 1) // ROUNDS_PER_REDUCER
    reducer = members[turn % len(members)].averager
    for index, cut in enumerate(cut_into_shards(len(values[0]))):
        shard = Shard(0, kind, number, index, slices)
        made = [
            member.averager.make_contribution(shard, value[cut], weight)
            for member, value, weight in zip(members, values, weights, strict=True)
        ]
        came = [decoder.decode(shard, contribution.encoded, len(contribution.values)) for contribution in made]
        present = [place for place, is_in_time in enumerate(in_time) if is_in_time]
        found = reducer.average(
            shard, [came[place] for place in present], [made[place].weight for place in present], None
        )
        assert found is not None
        for place, member in enumerate(members):
            answers[place][cut] = found.values
            member.averager.record_outcome(shard, made[place], in_time[place])
        sent += made[0].encoded.nbytes
    return answers, sent


@dataclass(frozen=True, slots=True)
class Flight:
    """A round of a slice under way: the snapshots, and the mean difference that is taken in at step `lands`."""

    lands: int
    step: int
    blocks: Blocks
    snapshots: list[Tensor]
    mean: Tensor


class Anchored:
    """Replicas step alone, and agree on a slice of their anchor every so many steps."""

    def __init__(self, setting: Setting, replicas: Sequence[Replica], seed: int) -> None:
        self.bytes_each, self.rounds = 0.0, 0
        self._setting, self._replicas = setting, replicas
        self._slices = FragmentDivision(len(replicas[0].flat), setting.slices, seed)
        self._in_time = InTime(setting.missing, seed, len(replicas))
        self._members = members_of(len(replicas), slice_wire=setting.wire)
        self._flights: list[Flight] = []

    def after(self, step: int) -> None:
        """Lets the replicas agree after all have taken `step` steps, or computed its gradients."""
        self._land(step)
        if step % self._setting.every == 0:
            self._flights.append(self._take_off(step))
            self._land(step)

    def _take_off(self, step: int) -> Flight:
        number = step // self._setting.every
        blocks = self._slices.blocks(number)
        found = [self._difference_of(replica, blocks) for replica in self._replicas]
        weights = [float(replica.tokens) for replica in self._replicas]
        differences, in_time = [difference for difference, _ in found], self._in_time.draw()
        means, sent = exchange(differences, weights, self._members, number, "fragment", in_time, self._slices.count)
        self.bytes_each += sent
        self.rounds += 1
        snapshots = [snapshot for _, snapshot in found]
        return Flight(step + self._setting.delay, step, blocks, snapshots, means[0])

    @staticmethod
    def _difference_of(replica: Replica, blocks: Blocks) -> tuple[Tensor, Tensor]:
        found = replica.stage.outer_gradient(blocks)
        assert found is not None, "the manifest of a setting with slices has inner steps"
        return found

    def _land(self, step: int) -> None:
        while self._flights and self._flights[0].lands <= step:
            flight = self._flights.pop(0)
            done = (True,) * len(cut_into_shards(len(flight.mean)))
            for replica, snapshot in zip(self._replicas, flight.snapshots, strict=True):
                replica.stage.outer_step(flight.step, flight.blocks, snapshot, (flight.mean, done))


def train(manifest: Manifest, sampler: Sampler, setting: Setting, steps: int, heldout: int) -> dict[str, float]:
    """Trains replicas; returns losses over `heldout` batches, the replicas' distance, bytes sent and rounds."""
    total = manifest.optimizer.target_tokens // manifest.model.context
    shares = sequences_of(total, setting.replicas, setting.unequal)
    replicas = [Replica(manifest, sampler, f"replica {number}", share) for number, share in enumerate(shares)]
    agreement = agree(setting, replicas, manifest.seed)
    for step in range(steps):
        for replica in replicas:
            replica.draw(step)
            replica.learn(step, setting.stale)
        if step:
            agreement.after(step)
        for replica in replicas:
            replica.learn(step, 1.0)
    agreement.after(steps)
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
    with replicas[0].stage.weights.writable() as flat:
        flat.copy_(mean)
    return {"loss_of_mean": replicas[0].loss(heldout), "loss_of_replica": statistics.fmean(alone), "apart": apart}


def agree(setting: Setting, replicas: Sequence[Replica], seed: int) -> Agreement:
    """Returns the way to agree that a setting names."""
    match setting.scheme:
        case "none":
            return NoAgreement()
        case "slices":
            return Anchored(setting, replicas, seed)
        case _:
            return Exact(replicas, setting.wire, setting.missing, seed)


def serve(spec: dict[str, Any], channel: Channel) -> None:
    """{"setting": {...}, "seed": n} trains and answers with what `train` found."""
    torch.set_num_threads(int(spec["threads"]))
    plain = Manifest.from_toml(spec["manifest"], "the benchmark's manifest")
    corpus = open_corpus(plain.data.corpus, ByteTokenizer(), Path(spec["cache"]))
    for order in channel.orders():
        setting = Setting(**order["setting"])
        manifest = setting.manifest(plain, order["seed"])
        sampler = Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed)
        channel.say(train(manifest, sampler, setting, int(spec["steps"]), int(spec["heldout"])))


def _batch_of(tokens: Tensor) -> TokenBatch:
    return TokenBatch.from_wire(tokens, has_marks=False)


def _microbatch(number: int) -> MicrobatchId:
    return MicrobatchId(number.to_bytes(16, "big"))
