"""Stages as torch modules. Knows families, layers and initial weights; must not know peers, streams or optimizers."""

from agora.model.family import Family
from agora.model.registry import family_of
from agora.model.stage_module import Stage, stage_loss

__all__ = ["Family", "Stage", "family_of", "stage_loss"]
