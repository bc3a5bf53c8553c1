"""The model section of a manifest: what every family's section has, one class per family, and the choice by `family`.

Adding a family: a subclass of ModelSection here, named in MODEL_SECTIONS, and a Family in agora.model.
"""

from __future__ import annotations

import abc
import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, ValidationError

from agora_protocol.base_config import canonical_config, parse_config, sizes_in
from agora_protocol.errors import ManifestError
from agora_protocol.fields import describe
from agora_protocol.limits import MAX_CONFIG_BYTES, MAX_WEIGHT_FILES
from agora_protocol.manifest_errors import explain_error, nearest_multiple, suggest
from agora_protocol.manifest_sections import Section

DEFAULT_FAMILY: Final = "subspace"
WRITE_ANEW: Final = "write the manifest with `swarm new run.toml --base-model DIR`"
WEIGHTS_FILE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors", re.ASCII)
# ORG/NAME or ORG/NAME@REVISION of the Hugging Face Hub, or the name of a folder, which is never a path.
BASE_NAME: Final = re.compile(
    r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@\w[\w./-]{0,127})?|[^/\\]{0,255}", re.ASCII
)
SHA256: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
ADAPTER_FILE: Final = "adapter_model.safetensors"
ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


class ModelSection(Section, abc.ABC):
    """Base of every family's model section: what the protocol asks of a model, whatever its family."""

    if TYPE_CHECKING:  # Each family declares these with its own bounds and defaults, in the order of its file.
        family: str
        layers: int
        context: int
        vocabulary: int

    @property
    @abc.abstractmethod
    def boundary_width(self) -> int:
        """Number of values of each token that a boundary carries."""

    @property
    def can_learn_samples(self) -> bool:
        return False

    @property
    def has_reference(self) -> bool:
        return False

    @property
    def dropout(self) -> float:
        return 0.0

    def full_boundary(self) -> dict[str, Any]:
        """Returns the changes to [model] that make boundaries carry the whole residual stream; {} unless overridden."""
        return {}

    def check_values(self) -> str | None:
        """Returns an error sentence with its remedy if values do not fit together; None if they do, or by default."""
        return None

    @classmethod
    def with_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Returns a [model] table's values plus the defaults that depend on other values; none unless overridden."""
        return values

    @classmethod
    def with_changes(cls, values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        """Returns a [model] table's values with changes; families also change values that depend on these."""
        return values | changes


class SubspaceSection(ModelSection):
    """The decoder that the run trains.

    The family `subspace`: a Llama-style decoder whose boundaries carry `subspace` coordinates of each token.
    """

    family: Literal["subspace"] = Field(
        default="subspace", description="model family; subspace is a Llama-style decoder"
    )
    width: int = Field(default=128, ge=2, le=65_536, description="residual stream width d; a multiple of heads")
    layers: int = Field(default=4, ge=1, le=1024, description="decoder layers in all; at least one for each stage")
    heads: int = Field(
        default=4, ge=1, le=1024, description="attention heads; width / heads must be even, for rotary positions"
    )
    key_value_heads: int = Field(default=2, ge=1, le=1024, description="heads of keys and values; divides heads")
    feed_forward: int = Field(default=352, ge=1, le=524_288, description="inner width of the SwiGLU feed-forward")
    context: int = Field(default=128, ge=1, le=1_048_576, description="tokens per sequence")
    vocabulary: int = Field(default=256, ge=2, le=2_097_152, description="token ids; 256 for the bytes tokenizer")
    subspace: int = Field(
        default=128, ge=2, le=65_536, description="rank k of the subspace that boundaries carry; at most width"
    )
    embedding: Literal["auto", "fixed", "learnt"] = Field(
        default="auto",
        description="fixed adds rows that the seed decides, outside the subspace; auto: fixed if subspace < width",
    )
    rope_theta: float = Field(default=10000.0, gt=0, le=1e12, description="base of the rotary position frequencies")
    norm_epsilon: float = Field(default=1e-5, gt=0, le=1, description="added to the mean square in RMSNorm")

    @property
    def is_embedding_fixed(self) -> bool:
        return self.embedding == "fixed" or (self.embedding == "auto" and self.subspace < self.width)

    @property
    def boundary_width(self) -> int:
        return self.subspace

    def full_boundary(self) -> dict[str, Any]:
        return {"subspace": self.width}

    def check_values(self) -> str | None:
        return self._check_heads() or self._check_subspace()

    @classmethod
    def with_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {"subspace": values["width"], **values} if "width" in values else values

    @classmethod
    def with_changes(cls, values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        changed, width = values | changes, changes.get("width")
        if isinstance(width, int) and "subspace" not in changes:
            for rule in (int, link_subspace):
                if values["subspace"] == rule(values["width"]):
                    return changed | {"subspace": rule(width)}
        return changed

    def _check_heads(self) -> str | None:
        if self.width % self.heads:
            return (
                f"[model] width {self.width} is not divisible by heads {self.heads}; "
                f"use a multiple of heads, such as width = {nearest_multiple(self.width, 2 * self.heads)}."
            )
        if self.heads % self.key_value_heads:
            fitting = max(n for n in range(1, self.heads + 1) if self.heads % n == 0 and n <= self.key_value_heads)
            return (
                f"[model] heads {self.heads} is not a multiple of key_value_heads {self.key_value_heads}; "
                f"use a divisor of heads, such as key_value_heads = {fitting}."
            )
        size = self.width // self.heads
        if size % 2:
            return (
                f"[model] the head size width / heads = {size} is odd, and rotary positions need pairs; "
                f"use width = {(size + 1) * self.heads}."
            )
        return None

    def _check_subspace(self) -> str | None:
        if self.subspace > self.width:
            return f"[model] subspace {self.subspace} is more than width {self.width}; remove it, or set it to less."
        if self.subspace < self.width and not self.is_embedding_fixed:
            return (
                f"[model] embedding learnt leaves tokens only a subspace of {self.subspace} in width {self.width}; "
                f'use embedding = "fixed".'
            )
        return None


class HfSection(ModelSection):
    """The Hugging Face decoder with whose weights the run begins.

    The family `hf`. Where a machine keeps the model's files is its own affair (`--base-model DIR`); the manifest says
    what they are.
    """

    family: Literal["hf"] = Field(default="hf", description="model family; hf continues to train a Hugging Face model")
    layers: int = Field(default=0, ge=0, le=1024, description="decoder layers in all, as in config")
    width: int = Field(default=0, ge=0, le=65_536, description="values of a token between layers, as in config")
    context: int = Field(default=1024, ge=1, le=1_048_576, description="tokens per sequence, at most those of config")
    vocabulary: int = Field(default=0, ge=0, le=2_097_152, description="token ids, as in config")
    config: str = Field(default="", max_length=MAX_CONFIG_BYTES, description="the model's config.json, in one line")
    weights: tuple[tuple[str, str], ...] = Field(
        default=(), max_length=MAX_WEIGHT_FILES, description="name and SHA-256 of each of its safetensors files"
    )
    tensors_hash: str = Field(
        default="", description="SHA-256 of their tensor list; empty: peers without the files cannot fetch them"
    )
    base_name: str = Field(
        default="", description="the model's name for people: ORG/NAME@REVISION of the Hub, or its folder's"
    )
    adapter_hash: str = Field(
        default="", description="SHA-256 of the adapter_model.safetensors that lora begins with; empty: with zeros"
    )
    trained: Literal["all", "lora"] = Field(
        default="all",
        description="all parameters, or lora: small matrices added to frozen ones, which stay as they are",
    )
    frozen_as: Literal["float32", "bf16", "nf4"] = Field(
        default="bf16", description="how lora keeps the frozen weights; nf4 is 4 bits, with double quantisation"
    )
    lora_rank: int = Field(default=16, ge=1, le=4096, description="inner width r of lora's matrices")
    lora_alpha: float = Field(default=32.0, gt=0, le=1e6, description="lora's product counts alpha / r times")
    lora_rslora: bool = Field(default=False, description="alpha / sqrt(r) instead of alpha / r")
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="share of values that lora drops while training")
    lora_targets: tuple[ModuleName, ...] = Field(
        default=(), max_length=64, description="linear layers that get lora, such as q_proj; empty: all inside layers"
    )

    @property
    def boundary_width(self) -> int:
        return self.width

    @property
    def can_learn_samples(self) -> bool:
        return True

    @property
    def has_reference(self) -> bool:
        return self.trained == "lora"

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """Name and SHA-256 of every file with tensors that the run begins with: `weights`, and the adapter's."""
        return (*self.weights, (ADAPTER_FILE, self.adapter_hash)) if self.adapter_hash else self.weights

    @property
    def dropout(self) -> float:
        # lora_dropout if lora is trained, otherwise 0; the base model's own dropout is off.
        return self.lora_dropout if self.trained == "lora" else 0.0

    @classmethod
    def with_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        try:
            config = parse_config(values["config"])
            sizes = sizes_in(config)
        except (KeyError, TypeError, ValueError):
            return values  # check_values reports what is wrong
        known = {"layers": sizes.layers, "width": sizes.width, "vocabulary": sizes.vocabulary}
        return {**known, **values, "config": canonical_config(config)}

    def check_values(self) -> str | None:
        name = self.base_name
        if not BASE_NAME.fullmatch(name) or not name.isprintable() or name in (".", ".."):
            return f"[model] base_name is {describe(name)}, which is neither ORG/NAME[@REVISION] nor a name; remove it."
        return self._check_config() or self._check_weights() or self._check_adapter()

    def _check_config(self) -> str | None:
        if not self.config:
            return f"[model] has no config, so there is no base model; {WRITE_ANEW}."
        try:
            config = parse_config(self.config)
            sizes = sizes_in(config)
        except ValueError as error:
            return f"[model] config {error}; {WRITE_ANEW} of a model that can be trained."
        for name in ("layers", "width", "vocabulary"):
            if getattr(self, name) != getattr(sizes, name):
                return f"[model] {name} {getattr(self, name)} is not the {getattr(sizes, name)} of config; remove it."
        if self.context > sizes.positions:
            return (
                f"[model] context {self.context} is more than the {sizes.positions} positions that the model knows; "
                f"use context = {sizes.positions} or less."
            )
        return None

    def _check_weights(self) -> str | None:
        # Names must not be paths, so that a manifest cannot make a machine read files in other folders.
        if not self.weights:
            return f"[model] weights names no file; {WRITE_ANEW}."
        for name, digest in self.weights:
            if not WEIGHTS_FILE.fullmatch(name):
                return (
                    f"[model] weights names {describe(name)}, which is not a name of a safetensors file; {WRITE_ANEW}."
                )
            if not SHA256.fullmatch(digest):
                return f"[model] weights has {describe(digest)} for {name}, which is not a SHA-256; {WRITE_ANEW}."
        if len({name for name, _ in self.files}) != len(self.files):
            return "[model] weights names one file twice; remove the repetition."
        if self.tensors_hash and not SHA256.fullmatch(self.tensors_hash):
            return f"[model] tensors_hash is {describe(self.tensors_hash)}, which is not a SHA-256; {WRITE_ANEW}."
        return None

    def _check_adapter(self) -> str | None:
        if not self.adapter_hash:
            return None
        if not SHA256.fullmatch(self.adapter_hash):
            return f"[model] adapter_hash is {describe(self.adapter_hash)}, which is not a SHA-256; {WRITE_ANEW}."
        if self.trained != "lora":
            return '[model] adapter_hash names an adapter of lora; use trained = "lora", or remove adapter_hash.'
        if not self.tensors_hash:
            return f"[model] adapter_hash needs a tensors_hash that covers the adapter; {WRITE_ANEW} --adapter DIR."
        return None


MODEL_SECTIONS: Final[dict[str, type[ModelSection]]] = {"subspace": SubspaceSection, "hf": HfSection}


def link_subspace(width: int) -> int:
    """Returns the subspace for slow links: 7/16 of the width, at least 2; docs/understand/codecs.md says why."""
    return max(2, 7 * width // 16)


def read_model_section(values: Any, source: str) -> Any:
    """Returns the values of a [model] table as the section of the family that they name.

    Values that are not tables are returned unchanged, so that the manifest's own check refuses them. Raises
    ManifestError, which begins with `source`, for an unknown family and for wrong values.
    """
    if not isinstance(values, dict):
        return values
    section = _section_of(values)
    if section is None:
        family = values["family"]
        raise ManifestError(
            f"{source}: [model] family {describe(family)} is unknown; {suggest(str(family), MODEL_SECTIONS)}"
        )
    try:
        return section.model_validate(section.with_defaults(values))
    except ValidationError as error:
        raise explain_error(error, section, source, within="model") from None


def model_with_changes(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the [model] table `values` with `changes`, and with changes of values that depend on them.

    For example the subspace follows the width. If the changes name another family, or an unknown one, returns
    `changes` alone.
    """
    section = _section_of(values | changes)
    if section is None or section is not _section_of(values):
        return changes
    return section.with_changes(values, changes)


def _section_of(values: dict[str, Any]) -> type[ModelSection] | None:
    family = values.get("family", DEFAULT_FAMILY)
    return MODEL_SECTIONS.get(family) if isinstance(family, str) else None
