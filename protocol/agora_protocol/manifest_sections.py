"""The sections of a manifest except [model]: every field with its type, bounds, default and one line of documentation.

The field descriptions become the comments of a manifest file.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from agora_protocol.codec_names import NumberFormatName

MAX_SEED: Final = 2**63 - 1
Share = Annotated[float, Field(ge=0, le=1)]
SHA256_OR_EMPTY: Final = r"^([0-9a-f]{64})?$"
PathText = Annotated[str, Field(min_length=1, max_length=1024)]


class Section(BaseModel):
    """Base of all sections: immutable; refuses undeclared fields, values that need conversion, and NaN.

    The first line of a section's docstring is its comment in the manifest's TOML file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StagesSection(Section):
    """Where the model is cut."""

    count: int = Field(default=2, ge=1, le=1024, description="stages the layers are cut into")
    first_layers: tuple[Annotated[int, Field(ge=0, le=1023)], ...] = Field(
        default=(), max_length=1024, description="the first layer of each stage, such as [0, 3]; empty cuts evenly"
    )


class BoundarySection(Section):
    """How activations and their gradients cross between peers."""

    codec: str = Field(
        default="bf16",
        max_length=32,
        description="float32 is exact, bf16 half of it, int8 to int2 less, int8h to int2h rotated; FORWARD/BACKWARD; "
        "topN: before them sends N columns",
    )


class OptimizerSection(Section):
    """How each stage learns from the summed gradients."""

    name: Literal["adamw", "nadam", "muon", "adamw8bit"] = Field(
        default="adamw",
        description="adamw; adamw8bit keeps moments in 8 bits; nadam where staleness is high; muon for the layers' "
        "matrices, with adamw for the rest",
    )
    learning_rate: float = Field(default=3e-3, gt=0, le=100, description="peak learning rate")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the gradient's mean")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="decay of the gradient's square")
    momentum: float = Field(
        default=0.95, ge=0, lt=1, description="muon: decay of the gradient's mean in the layers' matrices"
    )
    epsilon: float = Field(default=1e-8, gt=0, le=1, description="added to the square root in the update")
    weight_decay: float = Field(default=0.1, ge=0, le=10, description="decoupled weight decay, on matrices only")
    warmup_steps: int = Field(default=20, ge=0, le=10**9, description="steps of linear warm-up")
    total_steps: int = Field(default=2000, ge=1, le=10**9, description="steps until the learning rate has decayed")
    minimum_ratio: Share = Field(default=0.1, description="share of the peak that the learning rate decays to")
    clip: float = Field(default=1.0, ge=0, le=1e9, description="gradient norm limit over the whole model; 0 is none")
    average_decay: float = Field(
        default=0.99,
        ge=0,
        lt=1,
        description="decay of the weights' moving average, which is evaluated and exported; 0 keeps none",
    )
    target_tokens: int = Field(
        default=16_384,
        ge=1,
        le=2**40,
        description="tokens per optimizer step, over all replicas; whole microbatches, for sft supervised tokens",
    )


class ScheduleSection(Section):
    """How microbatches flow."""

    kind: Literal["asynchronous", "synchronous"] = Field(
        default="asynchronous",
        description="asynchronous never waits; synchronous finishes a step before the next begins",
    )
    microbatch: int = Field(default=8, ge=1, le=65_536, description="sequences per microbatch")
    max_in_flight: int = Field(
        default=0, ge=0, le=4096, description="microbatches an origin keeps in flight; 0 measures it"
    )
    staleness: float = Field(
        default=0.125, gt=0, le=64, description="most microbatches in flight, as a share of a step's; asynchronous runs"
    )
    predict_weights: bool = Field(
        default=True,
        description="compute gradients for a later step at predicted weights; asynchronous runs, where memory suffices",
    )
    least_replicas: int = Field(
        default=1, ge=1, le=4096, description="origins open nothing while a stage has fewer replicas than this"
    )
    activations: Literal["auto", "recompute", "keep"] = Field(
        default="auto", description="recompute the forward in the backward, or keep its graph; auto chooses by memory"
    )


# Where `schedule.predict_weights` is set, this many times `schedule.staleness` may be in flight.
PREDICTED_FACTOR: Final = 2
ALL_STEPS: Final = 10**9  # as `averaging.exact_steps`: no step is an inner step


class AveragingSection(Section):
    """How the replicas of a stage agree. Synchronous runs average every step's whole gradient, exactly, instead."""

    exact_steps: int = Field(
        default=ALL_STEPS,
        ge=0,
        le=ALL_STEPS,
        description="first optimizer steps along the mean gradient of all replicas; later ones are inner steps",
    )
    local_steps: Literal["auto", "never"] = Field(
        default="auto",
        description="auto: a stage whose uplinks carry no gradients takes inner steps until they do, although all "
        "steps are all-reduce steps; never",
    )
    fraction: float = Field(default=0.05, ge=0.001, le=1, description="share of a stage's weights that one slice has")
    every: int = Field(default=1, ge=1, le=10**6, description="inner steps from one slice to the next")
    outer_rate: float = Field(default=1.0, gt=0, le=2, description="learning rate of the anchor of inner steps")
    outer_momentum: float = Field(
        default=0.02, ge=0, lt=1, description="its Nesterov momentum for each step of a pass over all slices"
    )
    aggregation: Literal["mean", "clip"] = Field(
        default="mean", description="mean, or clip: centered clip, which bounds what a hostile replica can move"
    )
    gradient_wire: NumberFormatName = Field(
        default="int8",
        description="how mean gradients travel at most: normal2 to normal4 are that many bits, errors fed back",
    )
    share_of_uplink: Share = Field(
        default=0.5, description="share of its uplink that a peer gives to gradients; it sends fewer bits to keep to it"
    )
    slice_wire: NumberFormatName = Field(
        default="normal2", description="how a slice's differences to the anchor travel"
    )
    round_s: float = Field(
        default=20.0, ge=1, le=300, description="seconds after which a round ends, whoever is missing"
    )


class CheckpointSection(Section):
    """Which checkpoints peers keep on their disks."""

    every: int = Field(default=100, ge=1, le=10**6, description="optimizer steps between two checkpoints of a stage")
    keep: int = Field(default=3, ge=1, le=1000, description="checkpoints of a stage that a peer keeps")


class DataSection(Section):
    """What the run learns from."""

    corpus: tuple[PathText, ...] = Field(
        default=("stdlib",),
        min_length=1,
        max_length=64,
        description="stdlib, or .txt, .jsonl and .parquet files and globs",
    )
    weights: tuple[Annotated[float, Field(ge=0, le=1e9)], ...] = Field(
        default=(),
        max_length=64,
        description="how often text of each entry of corpus is drawn, such as [2.0, 1.0, 0.0]; empty: by its size",
    )
    tokenizer: PathText = Field(default="bytes", description="bytes, or the path of a tokenizers JSON file")
    heldout: float = Field(default=0.01, ge=0, le=0.5, description="share of the text that is never trained on")
    samples: Annotated[str, Field(max_length=1024)] | Annotated[tuple[PathText, ...], Field(max_length=64)] = Field(
        default="",
        description="sft and dpo: a file of records, a folder of such files or of datasets, or a list of these",
    )
    columns: tuple[tuple[PathText, PathText], ...] = Field(
        default=(),
        max_length=16,
        description='pairs: ["prompt", "question"] takes the prompt from the column question',
    )
    roles: tuple[tuple[PathText, PathText], ...] = Field(
        default=(), max_length=16, description='pairs: ["customer", "user"] takes messages of customer as those of user'
    )
    role_order: Literal["turns", "any"] = Field(
        default="turns", description="turns: user and assistant alternate, after a system message at most; any"
    )
    skip_bad: bool = Field(default=False, description="leave malformed records out instead of refusing the file")
    too_long: Literal["cut", "drop"] = Field(
        default="cut", description="samples that are longer than the context lose their end, or are left out"
    )
    chat_template: str = Field(
        default="", max_length=32_768, description="source of the chat template; empty: that of the tokenizer's folder"
    )
    samples_hash: str = Field(
        default="", pattern=SHA256_OR_EMPTY, description="SHA-256 of the samples' file or files; empty: not checked"
    )
    tokenizer_hash: str = Field(
        default="", pattern=SHA256_OR_EMPTY, description="SHA-256 of tokenizer and chat template; empty: not checked"
    )

    @property
    def sample_paths(self) -> tuple[str, ...]:
        """The files and folders of `samples`."""
        return (self.samples,) if isinstance(self.samples, str) and self.samples else tuple(self.samples)


class ObjectiveSection(Section):
    """What is learnt of the data."""

    kind: Literal["lm", "sft", "dpo"] = Field(
        default="lm",
        description="lm: every next token of the corpus; sft: answers of the samples; dpo: which answer is preferred",
    )
    preference_loss: Literal["sigmoid", "ipo"] = Field(default="sigmoid", description="dpo: the loss of a pair")
    beta: float = Field(default=0.1, gt=0, le=100, description="dpo: how strongly the model is held to the reference")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="dpo, sigmoid: the share of pairs that are expected to be swapped"
    )


class EvaluationSection(Section):
    """What is measured of the model while it trains. With tasks, one peer of stage 0 evaluates each time."""

    tasks: tuple[Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,64}$")], ...] = Field(
        default=(), max_length=8, description="heldout, and tasks of agora itself, such as sums; empty: none"
    )
    every: int = Field(default=1000, ge=1, le=10**9, description="optimizer steps from one evaluation to the next")
    items: int = Field(default=50, ge=1, le=4096, description="most questions of a task; of heldout, most microbatches")
    share: float = Field(
        default=0.02, gt=0, le=1, description="most microbatches of an evaluation by those that its origin trains on"
    )


class AdmissionSection(Section):
    """Who may take part."""

    mode: Literal["open", "listed", "ticket"] = Field(
        default="open",
        description="open to everyone; listed: only peers and founder; ticket: who shows a ticket, and founder",
    )
    peers: tuple[str, ...] = Field(
        default=(), max_length=512, description="peer ids (12D3KooW...) that mode listed admits"
    )
    public_status: bool = Field(
        default=False, description="whether everyone who knows the run's id may read its status and manifest"
    )
    oldest_version: str = Field(
        default="",
        pattern=r"^(\d{1,4}\.\d{1,4}\.\d{1,4})?$",
        description="the oldest version of agora that may take part, such as 0.2.0; empty: every one",
    )
    oldest_version_from: str = Field(
        default="",
        pattern=r"^(20\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01]))?$",
        description="the day, in UTC, from which on oldest_version counts, such as 2027-02-28; empty: at once",
    )
