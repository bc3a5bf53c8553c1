"""Chooses by the measured uplinks how a stage agrees with its replicas; the rules are in sync_rules.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agora_protocol.manifest import Manifest

from agora.core.clock import loop_time
from agora.core.live_manifest import LiveManifest
from agora.core.step_schedule import ALL_REDUCE, SyncChangeRule
from agora.observe import events
from agora.replica.shard_codec import ShardCodec
from agora.replica.sync_rules import (
    GradientCompression,
    MeasuredUplink,
    ReplicaUplink,
    Wish,
    choose_fragment_count,
    choose_gradient_compression,
)


class SyncChoice:
    """One stage's choice: the number format of its gradients, and all-reduces or inner steps with some fragments.

    compression: what gradients are sent as. The number of fragments is only this replica's wish: it becomes the stage's
    when all reducers of a round have it (core/step_schedule.py).
    """

    def __init__(
        self,
        stage: int,
        live: LiveManifest,
        codec: ShardCodec,
        *,
        uplinks: Callable[[], Sequence[ReplicaUplink]],
        uplink_bytes_per_s: Callable[[], float | None],
        replicated_numel: Callable[[], int],
        report: events.Report,
    ) -> None:
        """uplinks: of all live replicas, this one included. uplink_bytes_per_s: of this machine; None if never full.

        replicated_numel: elements of this peer's stages that have replicas, which share its uplink.
        """
        self._stage = stage
        self._live_manifest = live
        self._synchronous = live.core.schedule.kind == "synchronous"
        self._follow(live.core)
        self._codec = codec
        self._uplinks = uplinks
        self._uplink_bytes_per_s = uplink_bytes_per_s
        self._replicated_numel = replicated_numel
        self._report = report
        self._uplink = MeasuredUplink()
        self._wish = Wish(since=loop_time())
        self.compression = GradientCompression("float32" if self._synchronous else self._averaging.gradient_wire, "")

    def choose_compression(self, step: int, replicas: int, step_s: float | None, *, is_inner: bool) -> None:
        """Chooses what gradients are sent as, after each step. step: how many were taken. step_s: seconds of a step;
        None: not known.
        """
        self._follow(self._live_manifest.at(step))
        if self._synchronous:
            return
        self._uplink = self._uplink.after_step(self._uplink_bytes_per_s())
        if step_s is None and self._uplink.rate is not None and replicas > 1:
            return  # the rate of a replica is unknown, as after a join: the last choice stays
        section, numel = self._averaging, self._replicated_numel()
        chosen = choose_gradient_compression(
            section.gradient_wire, numel, replicas, self._uplink, step_s, section.share_of_uplink
        )
        # During inner steps no gradient is sent; the choice still says what the uplink carries.
        if chosen.name != self.compression.name and not is_inner:
            self._report(events.GradientWireChosen(self._stage, chosen.name, chosen.reason))
        self.compression = chosen
        self._codec.send_gradients_as(self._stage, chosen.name)

    def _follow(self, manifest: Manifest) -> None:
        self._averaging = manifest.averaging
        self._change_rule = SyncChangeRule.from_manifest(manifest)

    def fragments_to_ask_for(self, present: int) -> int:
        """Returns in how many fragments, or ALL_REDUCE, this replica as a reducer asks the stage to agree later."""
        wanted = self.update_wish(present)
        return wanted if self._wish.is_held(loop_time()) else present

    def update_wish(self, present: int) -> int:
        """Returns the number of fragments that is wanted where the stage has `present`, and notes since when.

        Is called at least after every step: a wish is held only if nothing else was wanted in between.
        """
        if not self._change_rule.may_change:
            return present
        wanted, _ = self.explain_fragments(present)
        self._wish = self._wish.after(present, wanted, loop_time())
        return wanted

    def explain_fragments(self, present: int) -> tuple[int, str]:
        """Returns the number of fragments that is wanted now, and the reason in words."""
        return choose_fragment_count(present, self._uplinks(), self._change_rule.most_fragments)

    def describe(self, fragments: int) -> str:
        """Returns in words how the stage agrees while it has `fragments`, or ALL_REDUCE, and why."""
        if fragments == ALL_REDUCE:
            return f"mean gradients, sent as {self.compression.reason or self.compression.name}"
        pass_steps = fragments * self._averaging.every
        text = f"inner steps, all weights once in {pass_steps} steps, sent as {self._averaging.slice_wire}"
        return f"{text}: {self.explain_fragments(fragments)[1]}"
