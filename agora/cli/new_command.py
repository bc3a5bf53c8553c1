"""`swarm new`: writes a manifest, from a preset or for a base model of this machine or of the Hub.

Loads torch and transformers, which check the base model's files, only for a base model. How that is trained unless the
flags say otherwise:

| trained | objective | learning rate | why |
|---|---|---|---|
| all | lm, sft, dpo | 2e-5 | small steps keep what the model knows |
| lora | lm, sft | 2e-4 | the usual one of QLoRA: its matrices start at zero and must change a lot |
| lora | dpo | 2e-5 | the loss of a pair sums over all tokens of two answers; at higher rates both become less likely |
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agora_protocol.base_config import BaseSizes, parse_config, sizes_in
from agora_protocol.errors import LocalError, ManifestError
from agora_protocol.manifest import Manifest
from agora_protocol.manifest import preset as manifest_of_preset
from agora_protocol.manifest_model import ADAPTER_FILE, HfSection
from agora_protocol.manifest_sections import ALL_STEPS, DataSection

from agora.cli.console import EXIT_USAGE, Failure, print_json, print_to_stderr
from agora.cli.data_command import USUAL_READING, ReadingChoice, adapter_lines, check_objective, local_files
from agora.cli.run_data import TrainingData, read_training_data
from agora.core.hub_files import CONFIG_FILE, TOKENIZER_FILE
from agora.core.user_paths import expand_home
from agora.data.local_files import LocalFiles
from agora.data.text_sources import STDLIB
from agora.data.tokenizer import BYTES, open_tokenizer
from agora.tuning.base.hub import Kind, fetch_adapter, fetch_model, hub_id_of, public_name
from agora.tuning.chat.sample_formats import Objective

if TYPE_CHECKING:
    from agora.tuning.adapters.peft_folder import PeftAdapter

BYTE_VALUES = 256
TRAINED: Final = ("all", "lora")
FROZEN_AS: Final = ("float32", "bf16", "nf4")
USUAL_FROZEN_AS: Final = "bf16"
CONTEXT: Final = 1024
CONTEXT_BLOCK: Final = 64
CODEC: Final = "int5h/int2"  # docs/understand/base_models.md says what it costs
MICROBATCH: Final = 2  # for dpo one pair
STALENESS: Final = 0.5  # steps have few microbatches, and their rates are small: half a step in flight keeps peers busy
TARGET_TOKENS: Final = 16_384
ROWS_OF_A_STEP: Final = 32
FEWER_ROWS_OF_A_STEP: Final = 16
MANY_STEPS: Final = 100
MANY_TIMES_ASKED: Final = 1.25  # steps that see the data so many times as often as was asked are said
FULL_RATE, LORA_RATE, LORA_DPO_RATE = 2e-5, 2e-4, 2e-5
WARMUP_SHARE: Final = 0.05
MAX_WARMUP_STEPS: Final = 100
HELDOUT_SAMPLES: Final = 64
MIN_HELDOUT, MAX_HELDOUT = 0.01, 0.1


@dataclass(frozen=True, slots=True)
class TuningChoice:
    """The flags of `swarm new` about training a base model; None for one that was not given.

    data: the data files, or folders of them.
    objective: "lm", "sft" or "dpo".
    trained: which parameters, one of TRAINED.
    frozen_as: how LoRA keeps the base model's weights, one of FROZEN_AS.
    epochs: how often the data is seen.
    adapter: the LoRA adapter to go on from: its folder, or for `run` its Hub id.
    """

    data: tuple[Path, ...] = ()
    objective: str | None = None
    trained: str | None = None
    frozen_as: str | None = None
    epochs: float | None = None
    reading: ReadingChoice = USUAL_READING
    adapter: Path | None = None


NOTHING_CHOSEN: Final = TuningChoice()


def run(
    path: Path,
    preset: str | None,
    base_model: Path | None,
    name: str | None,
    choice: TuningChoice = NOTHING_CHOSEN,
    *,
    as_json: bool = False,
) -> None:
    """Writes a manifest to the new file `path`, and prints a summary and what to do next. Raises Failure when the file
    exists, for flags that do not fit together and an invalid manifest; for a base model also BaseModelError,
    PackageMissing and, for the data file, DataError or DiskError.
    """
    if base_model is not None and preset is not None:
        raise Failure("--preset and --base-model exclude each other; give one of them", EXIT_USAGE)
    if base_model is None and choice != NOTHING_CHOSEN:
        raise Failure(
            "--data, --adapter and what is learnt of it are for a base model; give one with --base-model DIR",
            EXIT_USAGE,
        )
    if path.exists():
        raise Failure(f"{path} exists; choose another name, or remove it first")
    name = name or re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]", "", path.stem)[:64] or "run"
    try:
        if base_model is not None:
            folder, base_model = _find_folder(base_model)
            adapter = named_adapter = None
            if choice.adapter is not None:
                adapter, named_adapter = _find_folder(choice.adapter, "adapter")
            with local_files(choice.data, path.with_suffix(".data.json").absolute()) as files:
                tuning = manifest_of_base_model(folder, name, replace(choice, data=files, adapter=adapter))
            made, elsewhere = name_files(tuning.manifest, path.absolute().parent, folder)
            beside = [] if adapter is not None else adapter_lines(folder, "adapter      ")
            summary = [*beside, *tuning.summary_lines()]
        else:
            made = manifest_of_preset(preset or "tiny").with_values(name=name)
            summary, elsewhere, named_adapter = _tokenizer_lines(made), [], None
    except ManifestError as error:
        raise Failure(str(error), EXIT_USAGE) from None
    _write_manifest(path, made)
    flag = f" --base-model {shlex.quote(str(base_model))}" if base_model is not None else ""
    flag += f" --adapter {shlex.quote(str(named_adapter))}" if named_adapter is not None else ""
    flag += "".join(f" --data {shlex.quote(file)}" for file in elsewhere)
    next_command = f"agora-node join {shlex.quote(str(path))}{flag}"
    if as_json:
        print_json({"schema": 1, "manifest": str(path), "name": name, "summary": summary, "next": next_command})
        return
    for line in summary:
        print_to_stderr(line)
    print_to_stderr(f"wrote {path}: edit it, then start the run with `{next_command}`")


def name_files(made: Manifest, manifest_folder: Path, base_model: Path) -> tuple[Manifest, list[str]]:
    """Returns the manifest with names instead of this machine's paths, and those that `join --data` has to say here.

    They are the files that a machine does not find by itself beside its manifest or base model. Raises Failure for two
    files of one name.
    """
    data = made.data
    paths = [file for file in data.sample_paths or data.corpus if file != STDLIB]
    names = {file: Path(file).name for file in paths}
    if len(set(names.values())) < len(names):
        raise Failure(
            "two data files have one name, and other machines find them by their names; rename one", EXIT_USAGE
        )
    key = "samples" if data.sample_paths else "corpus"
    named = tuple(names.get(file, file) for file in data.sample_paths or data.corpus)
    values: dict[str, Any] = {key: named[0] if isinstance(data.samples, str) and key == "samples" else named}
    elsewhere = []
    for file in paths:
        try:
            (found,) = LocalFiles((), manifest_folder, base_model).localise(DataSection(corpus=(names[file],))).corpus
            is_found = Path(found).samefile(file)
        except (LocalError, OSError):
            is_found = False
        elsewhere += [] if is_found else [file]
    return made.with_values(data={**values, "tokenizer": TOKENIZER_FILE}), elsewhere


def _write_manifest(path: Path, made: Manifest) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(made.to_toml())
    except OSError as error:
        raise Failure(f"cannot write {path} ({error.strerror}); choose another place") from None


def _tokenizer_lines(made: Manifest) -> list[str]:
    if made.data.tokenizer != BYTES or made.model.vocabulary == BYTE_VALUES:
        return []
    return [
        f"tokenizer    bytes, which need no file; for the vocabulary of {made.model.vocabulary:,} name a "
        "tokenizer.json, or its folder, in [data] tokenizer"
    ]


def _find_folder(named: Path, kind: Kind = "model") -> tuple[Path, Path]:
    # Of a model or adapter that is named by its folder or its Hub id; and how `join` shall be told of it.
    hub_id = hub_id_of(named)
    if hub_id is None:
        return named, named
    files = "config, safetensors file" if kind == "adapter" else "config, tokenizer, safetensors files"
    print_to_stderr(f"fetching {hub_id} from the Hugging Face Hub, unless it is here: {files}")
    found = fetch_adapter(hub_id) if kind == "adapter" else fetch_model(hub_id)
    print_to_stderr(f"hub          {found.hub_id} is in {found.folder}")
    return found.folder, Path(str(found.hub_id))


@dataclass(frozen=True, slots=True)
class TuningManifest:
    """data: the data file with its counts; None without one. epochs: how often the steps see the data."""

    manifest: Manifest
    data: TrainingData | None
    epochs: float
    adapter: str = ""  # what is said of the adapter that it goes on from

    def summary_lines(self) -> list[str]:
        begins = [f"adapter      {self.adapter}"] if self.adapter else []
        if begins and self.manifest.objective.kind == "dpo":
            begins.append("reference    the base model with this adapter, as it is now")
        if self.data is None:
            return begins
        optimizer = self.manifest.optimizer
        times = "once" if self.epochs == 1 else f"{self.epochs:g} times"
        rows = self.data.rows * (1.0 - heldout_share(self.data))
        tokens = rows * tokens_of_row(self.data, self.manifest.model.context)
        if (seen := optimizer.total_steps * optimizer.target_tokens / tokens) > MANY_TIMES_ASKED * self.epochs:
            why = ": a step has more tokens than the data" if optimizer.target_tokens > tokens else ""
            times = f"{seen:,.3g} times{why}"
        held = f"{optimizer.target_tokens:,} {'supervised tokens' if self.data.objective == 'sft' else 'tokens'}"
        heldout = [] if self.manifest.data.heldout else ["held out     nothing: the data is too little for it"]
        return [
            *begins,
            *self.data.summary_lines(self.manifest.model.context),
            *heldout,
            f"steps        {optimizer.total_steps:,} of {held}, which see the data {times}; "
            f"learning rate {optimizer.learning_rate:g}",
        ]


def manifest_of_base_model(folder: Path, name: str, choice: TuningChoice) -> TuningManifest:
    """Returns a new manifest, named `name`, of a run that trains the Hugging Face model in `folder` as chosen.

    What was not chosen has default values, which depend on the model and the data, see the table above. Reads the
    weights files once, for their hashes, and the data file, and shows the progress of both. Raises Failure without a
    tokenizer in the folder and for choices that do not fit together, BaseModelError for missing or unreadable files,
    ManifestError for a config that cannot be trained, PackageMissing without transformers; for the data file InputError
    for malformed columns, DataError if it is wrong, DiskError if it cannot be read, Failure if nothing in it can be
    learnt.
    """
    from agora.tuning.hf_family import HfFamily

    folder = expand_home(folder).absolute()
    chosen_objective = check_choice(choice)
    config, sizes = _read_model_config(folder)
    open_tokenizer(str(folder / TOKENIZER_FILE), sizes.vocabulary)  # what `join` would refuse after signing
    context = min(CONTEXT, sizes.positions)
    adapter = _read_adapter(choice.adapter, config, public_name(folder))
    data = None
    if choice.data:
        data = read_training_data(choice.data, folder, choice.reading, chosen_objective, context)
        context = fitting_context(data, context)
    objective = data.objective if data is not None else "lm"
    trained = choose_parameters(choice, objective)
    epochs = choice.epochs or 1.0
    values: dict[str, Any] = {
        "name": name,
        "model": {
            "family": "hf",
            "config": config,
            "context": context,
            **_hash_weights(folder, adapter),
            "base_name": public_name(folder),
        },
        "stages": {"count": min(2, sizes.layers)},
        "boundary": {"codec": CODEC},
        "schedule": {"microbatch": MICROBATCH, "staleness": STALENESS},
        "optimizer": optimizer_values(trained, objective, context),
        "data": {"tokenizer": str(folder / TOKENIZER_FILE)},
        "objective": {"kind": objective},
    }
    if trained == "lora":
        values["model"] |= {"trained": trained, "frozen_as": choice.frozen_as or USUAL_FROZEN_AS}
        values["averaging"] = {"exact_steps": ALL_STEPS, "gradient_wire": "float32"}
    if adapter is not None:
        values["model"] |= adapter.manifest_values()
    if data is not None:
        values["data"] |= _data_values(data, folder)
        values["optimizer"] |= step_values(data, context, epochs)
    made = Manifest.from_values(values, str(folder))
    assert isinstance(made.model, HfSection)
    HfFamily(made.model).check_folder(folder)
    return TuningManifest(made, data, epochs, adapter.sentence() if adapter is not None else "")


def check_choice(choice: TuningChoice) -> Objective | None:
    """Checks the flags in `choice`, and returns the chosen objective; None if none was chosen.

    Raises Failure for an unknown value of a flag, and for sft, dpo, and flags about data without any.
    choose_parameters checks the rest.
    """
    objective = check_objective(choice.objective)
    for flag, value, known in (("train", choice.trained, TRAINED), ("frozen-as", choice.frozen_as, FROZEN_AS)):
        if value is not None and value not in known:
            raise Failure(f"--{flag} is {', '.join(known[:-1])} or {known[-1]}", EXIT_USAGE)
    if not choice.data:
        if objective in ("sft", "dpo"):
            raise Failure(f"--objective {objective} learns from samples; give them with --data FILE", EXIT_USAGE)
        given = {"epochs": choice.epochs} | asdict(choice.reading)
        for flag, value in given.items():
            if value not in (None, False):
                raise Failure(f"--{flag.replace('_', '-')} is about a data file; give one with --data FILE", EXIT_USAGE)
    return objective


def choose_parameters(choice: TuningChoice, objective: Objective) -> str:
    """Raises Failure for "all" with dpo, with --frozen-as, and with an adapter."""
    trained = choice.trained or ("all" if objective == "lm" and choice.adapter is None else "lora")
    if trained == "all" and choice.adapter is not None:
        raise Failure(
            "--adapter is what lora goes on from; leave --train all out, or merge the adapter before", EXIT_USAGE
        )
    if trained == "all" and objective == "dpo":
        raise Failure("--objective dpo compares with the model as it began, which only --train lora keeps", EXIT_USAGE)
    if trained == "all" and choice.frozen_as is not None:
        raise Failure("--frozen-as is about what lora leaves as it is; add --train lora, or leave it out", EXIT_USAGE)
    return trained


def fitting_context(data: TrainingData, context: int) -> int:
    """For dpo the longest sample, rounded up to CONTEXT_BLOCK, if that is less: a row of dpo holds one answer, and its
    padding costs computation.
    """
    if data.objective != "dpo":
        return context
    return min(context, math.ceil(int(data.found.lengths.max()) / CONTEXT_BLOCK) * CONTEXT_BLOCK)


def optimizer_values(trained: str, objective: Objective, context: int) -> dict[str, Any]:
    """What holds without counts of data. LoRA, sft and dpo learn for a few hundred steps, in which an average would
    lag.
    """
    rows = max(TARGET_TOKENS // (MICROBATCH * context), 1) * MICROBATCH if objective == "lm" else ROWS_OF_A_STEP
    values = {"weight_decay": 0.0, "learning_rate": FULL_RATE, "target_tokens": rows * context}
    if trained == "lora":
        values["learning_rate"] = LORA_DPO_RATE if objective == "dpo" else LORA_RATE
    if trained == "lora" or objective != "lm":
        values["average_decay"] = 0.0
    return values


def step_values(data: TrainingData, context: int, epochs: float) -> dict[str, Any]:
    """Returns target_tokens, total_steps and warmup_steps of [optimizer], so that steps see the data `epochs` times.

    Data that is held out is left out. A step has about ROWS_OF_A_STEP rows of samples, or FEWER_ROWS_OF_A_STEP if
    otherwise there were fewer than MANY_STEPS steps; of plain text it has about TARGET_TOKENS tokens. A row counts as
    `context` tokens, for sft as the mean number of its supervised tokens. The warm-up is WARMUP_SHARE of the steps, at
    most MAX_WARMUP_STEPS and fewer than all.
    """
    trained_rows = data.rows * (1.0 - heldout_share(data)) * epochs
    if data.objective == "lm":
        rows = optimizer_values("all", "lm", context)["target_tokens"] // context
    else:
        rows = ROWS_OF_A_STEP if trained_rows >= MANY_STEPS * ROWS_OF_A_STEP else FEWER_ROWS_OF_A_STEP
    tokens_of_a_row = tokens_of_row(data, context)
    target = max(1, round(rows * tokens_of_a_row))
    steps = max(1, math.ceil(trained_rows * tokens_of_a_row / target))
    warmup = min(MAX_WARMUP_STEPS, math.ceil(WARMUP_SHARE * steps), steps - 1)
    return {"target_tokens": target, "total_steps": steps, "warmup_steps": warmup}


def tokens_of_row(data: TrainingData, context: int) -> float:
    """Returns how many tokens of a row count for target_tokens: for sft the mean number of its supervised ones."""
    return data.found.supervised / data.rows if data.objective == "sft" else float(context)


def heldout_share(data: TrainingData) -> float:
    """Returns the fraction, from 0 to 1, of the data to hold out for evaluation: MIN_HELDOUT for lm.

    0 if there is one sample, or text for one row: then all of it is trained on. Otherwise HELDOUT_SAMPLES / number of
    trainable samples, at least MIN_HELDOUT and at most MAX_HELDOUT, rounded to three decimals.
    """
    if data.objective == "lm":
        return MIN_HELDOUT if (data.found.tokens - 1) // data.found.context > 1 else 0.0
    if data.trainable_samples < 2:
        return 0.0
    return round(min(MAX_HELDOUT, max(MIN_HELDOUT, HELDOUT_SAMPLES / data.trainable_samples)), 3)


def _read_model_config(folder: Path) -> tuple[str, BaseSizes]:
    from agora.tuning.base.model_files import read_config

    text = read_config(folder)
    try:
        sizes = sizes_in(parse_config(text))
    except ValueError as error:
        raise ManifestError(f"{folder / CONFIG_FILE} {error}; choose another model.") from None
    if not (folder / TOKENIZER_FILE).is_file():
        raise Failure(
            f"{folder} has no {TOKENIZER_FILE}, the tokenizer that the run's text is read with; write it there with "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers"
        )
    return text, sizes


def _read_adapter(named: Path | None, config: str, base_name: str) -> PeftAdapter | None:
    from agora.tuning.adapters.peft_folder import read_adapter

    if named is None:
        return None
    model = HfSection.with_defaults({"family": "hf", "config": config, "base_name": base_name})
    return read_adapter(expand_home(named).absolute(), HfSection.model_validate(model))


def _hash_weights(folder: Path, adapter: PeftAdapter | None) -> dict[str, Any]:
    # An adapter's tensors are in the list too, so that peers give them like those of the base model.
    from agora.tuning.base.model_files import file_hash, tensor_list_hash, weight_files

    names = weight_files(folder)
    size = sum((folder / file).stat().st_size for file in names)
    print_to_stderr(f"reading {len(names)} weights files of {size / 1e6:,.1f} MB, for their hashes")
    weights = tuple((file, file_hash(folder / file)) for file in names)
    adapted = [] if adapter is None else [adapter.folder / ADAPTER_FILE]
    return {"weights": weights, "tensors_hash": tensor_list_hash([*(folder / file for file in names), *adapted])}


def _data_values(data: TrainingData, folder: Path) -> dict[str, Any]:
    # Otherwise "samples", the path, with "columns", "heldout" and the hashes of `_data_hashes`. folder: the base
    # model's.
    if data.objective == "lm":
        return {"corpus": tuple(map(str, data.named)), "heldout": heldout_share(data)}
    rules = data.files.rules
    named = tuple(map(str, data.named))
    return {
        "samples": named[0] if len(named) == 1 else named,
        "columns": tuple(rules.columns.items()),
        "roles": tuple(rules.roles.items()),
        "role_order": "any" if rules.any_order else "turns",
        "skip_bad": rules.skip_bad,
        "too_long": "drop" if rules.drop_long else "cut",
        "chat_template": data.chat_template,
        "heldout": heldout_share(data),
        **_data_hashes(data, folder),
    }


def _data_hashes(data: TrainingData, base_model: Path) -> dict[str, str]:
    from agora.tuning.chat.model_tokenizer import open_training_tokenizer
    from agora.tuning.chat.sample_file import hash_samples

    tokenizer = open_training_tokenizer(str(base_model / TOKENIZER_FILE), 2**31, template=data.chat_template)
    return {"samples_hash": hash_samples(data.named), "tokenizer_hash": tokenizer.fingerprint}
