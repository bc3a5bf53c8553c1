"""Stages as torch modules. Knows families, layers and initial weights; must not know peers, streams or optimizers."""

from agora.model.family import Context, Stage, build_stage, parameter_shapes, stage_loss

__all__ = ["Context", "Stage", "build_stage", "parameter_shapes", "stage_loss"]
