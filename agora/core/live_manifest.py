"""The manifest of a live run: its core for life, and what amendments make of it from a step on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from agora_protocol.amendments import SealedAmendment, manifest_at
from agora_protocol.manifest import Manifest


@dataclass(frozen=True, slots=True)
class _Period:
    # The steps from `start` on, until the next period.
    start: int
    manifest: Manifest
    number: int  # of the last amendment in force; 0: none
    digest: bytes  # its hash; b"": none


class LiveManifest:
    """What the manifest is at each optimizer step. Any thread may read it, while another one amends it.

    core: the signed manifest, which never changes.
    """

    def __init__(self, core: Manifest, chain: Sequence[SealedAmendment] = ()) -> None:
        """chain: the amendments that count, in order; they must fit the core."""
        self.core = core
        self.amend(chain)

    def amend(self, chain: Sequence[SealedAmendment]) -> None:
        """Replaces all amendments by those of `chain`. What has been read stays as it was."""
        periods = [_Period(0, self.core, 0, b"")]
        amendments = [each.amendment for each in chain]
        for each in chain:
            start = each.amendment.from_step
            if periods[-1].start == start:
                periods.pop()  # two amendments from one step on
            amended = manifest_at(self.core, amendments[: each.amendment.number], start)
            periods.append(_Period(start, amended, each.amendment.number, each.hash))
        self._periods = tuple(periods)

    def at(self, step: int) -> Manifest:
        """Returns the manifest that step number `step` (0 is the first) is taken by."""
        return self._period(step).manifest

    def number_at(self, step: int) -> int:
        """Returns the number of the last amendment that is in force at step number `step`; 0 for none."""
        return self._period(step).number

    def hash_at(self, step: int) -> bytes:
        """Returns the hash of the last amendment that is in force at step number `step`; b"" for none."""
        return self._period(step).digest

    def target_tokens(self, step: int) -> int:
        return self.at(step).optimizer.target_tokens

    @property
    def of_all_steps(self) -> tuple[Manifest, ...]:
        """The manifests that some step is taken by, the signed one first."""
        return tuple(period.manifest for period in self._periods)

    @property
    def greatest_target_tokens(self) -> int:
        """The greatest `optimizer.target_tokens` of all steps."""
        return max(manifest.optimizer.target_tokens for manifest in self.of_all_steps)

    @property
    def last(self) -> Manifest:
        """The manifest as the last amendment has it, to whose step the run comes in any case."""
        return self._periods[-1].manifest

    @property
    def total_steps(self) -> int:
        """After how many steps the run ends."""
        return self.last.optimizer.total_steps

    def _period(self, step: int) -> _Period:
        periods = self._periods
        return periods[bisect_right(periods, step, key=lambda period: period.start) - 1]
