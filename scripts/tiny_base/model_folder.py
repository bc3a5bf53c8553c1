"""Makes the folder of a tiny base model: weights in two shards, config, tokenizer, chat template and example data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

from agora.cli.console import ProgressDisplay, print_to_stderr
from agora.data.text_sources import SourceFile
from agora.state.files import fresh_folder
from tiny_base.example_data import write_examples
from tiny_base.pretraining import CONTEXT, Budget, Pretrained, make_model, pretrain
from tiny_base.pretraining_text import documents
from tiny_base.stdlib_docs import documented_names, read_sources
from tiny_base.turn_tokenizer import END_OF_TEXT, END_OF_TURN, train_tokenizer, write_tokenizer

DATA_FOLDER: Final = "data"
# The most of all bytes that a shard holds: no tensor has more than a quarter of them, so there are two shards.
SHARE_OF_FIRST_SHARD: Final = 0.6
FOLDER_BYTES: Final = 64 << 20
TEXTS_AT_ONCE: Final = 32
SAMPLE_TOKENS: Final = 80
SAMPLE_TEMPERATURE: Final = 0.7


@dataclass(frozen=True, slots=True)
class TinyBase:
    """What was made. examples: records of each data file by its name. text: what the model writes by itself."""

    parameters: int
    vocabulary: int
    pretrained: Pretrained
    examples: dict[str, int]
    text: str

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of the command's JSON object."""
        about = {"parameters": self.parameters, "vocabulary": self.vocabulary, "context": CONTEXT}
        return {**about, **asdict(self.pretrained), "examples": self.examples, "text": self.text}


def make_base(place: Path, files: Sequence[SourceFile], budget: Budget, seed: int) -> TinyBase:
    """Pretrains a model on the source files and writes its folder to `place`, which appears when it is complete.

    With a budget of steps, equal arguments give the same files on the same machine. Raises DiskError if the folder
    cannot be written or a file not be read, TuningMissing without transformers.
    """
    sources = read_sources(files)
    print_to_stderr(f"training a tokenizer on {len(sources)} files of {sum(len(s.text) for s in sources) / 1e6:.1f} MB")
    tokenizer = train_tokenizer(source.text for source in sources)
    ids = _encode(tokenizer, list(documents(sources)))
    end_of_text, end_of_turn = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END_OF_TURN)
    model = make_model(tokenizer.get_vocab_size(), end_of_text, end_of_turn, seed)
    pretrained = _pretrain(model, ids, budget, seed)
    with fresh_folder(place, FOLDER_BYTES) as folder:
        parameters = _save_model(model, folder)
        write_tokenizer(tokenizer, folder, CONTEXT)
        examples = write_examples(documented_names(sources), folder / DATA_FOLDER)
    text = sample_text(model, tokenizer, end_of_text, seed)
    return TinyBase(parameters, tokenizer.get_vocab_size(), pretrained, examples, text)


def _encode(tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    batches = (texts[first : first + TEXTS_AT_ONCE] for first in range(0, len(texts), TEXTS_AT_ONCE))
    encodings = (tokenizer.encode_batch(batch, add_special_tokens=False) for batch in batches)
    return torch.cat([torch.tensor(encoding.ids, dtype=torch.int64) for batch in encodings for encoding in batch])


def _pretrain(model: Any, ids: torch.Tensor, budget: Budget, seed: int) -> Pretrained:
    steps = f" of {budget.steps}" if budget.steps is not None else ""
    until = f"for {budget.seconds:.0f} s" if budget.steps is None else f"for {budget.steps} steps"
    with ProgressDisplay(f"pretraining on {len(ids):,} tokens {until}", 1.0) as display:

        def report(step: int, loss: float, spent: float) -> None:
            display.show(spent, f"step {step}{steps}  loss {loss:.3f}")

        return pretrain(model, ids, budget, seed, report)


def _save_model(model: Any, folder: Path) -> int:
    import_module("transformers.utils.logging").disable_progress_bar()
    sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    model.save_pretrained(folder, max_shard_size=int(SHARE_OF_FIRST_SHARD * sum(sizes)))
    return sum(parameter.numel() for parameter in model.parameters())


def sample_text(model: Any, tokenizer: Any, end_of_text: int, seed: int) -> str:
    """Returns the beginning of a document that the model writes."""
    torch.manual_seed(seed)
    begin = torch.tensor([[end_of_text]])
    drawing = {"do_sample": True, "temperature": SAMPLE_TEMPERATURE, "max_new_tokens": SAMPLE_TOKENS}
    (ids,) = model.generate(begin, attention_mask=torch.ones_like(begin), pad_token_id=end_of_text, **drawing).tolist()
    return str(tokenizer.decode(ids))
