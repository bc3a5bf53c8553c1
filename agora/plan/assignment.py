"""A plan: which machine holds which stages, what share of their microbatches it gets, and what comes of it. Pure.

Knows: the words of a plan. Must not know: how one is found (search.py), how it is printed, peers.
"""

from __future__ import annotations

from dataclasses import dataclass

from agora_protocol.ids import Span

from agora.plan.cost import Limit, Rate
from agora.plan.machine import Machine


@dataclass(frozen=True, slots=True)
class Assignment:
    """One machine's place in a plan.

    span: the stages it holds; None: it stays idle. rate: what it could do at its span, and how. share: the part of the
    microbatches of its stages that it gets, 0 to 1.
    """

    machine: Machine
    span: Span | None
    rate: Rate
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The stages that the others wait for, and what bounds most of the work of those who hold them."""

    stages: Span
    limit: Limit


@dataclass(frozen=True, slots=True)
class Plan:
    """Who holds what. rate: microbatches per second of the whole swarm; stage_rates: of each stage's holders together.

    assignments: one for each machine, in the order in which the machines were given.
    """

    assignments: tuple[Assignment, ...]
    stage_rates: tuple[float, ...]
    rate: float
    bottleneck: Bottleneck
