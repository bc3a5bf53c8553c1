"""The base models of the tuning benchmark, made here: one with random weights, and two pretrained for about a minute.

Text is bytes, so the vocabulary is 256 and no tokenizer file is needed.

Large pretrained models have a few columns of the residual stream that are tens of times larger than the others, in
every token (arXiv 2208.07339, 2402.17762). They decide what a codec costs, and a model of a minute has none. So one
model gets some: in its embedding, OUTLIER_COLUMNS begin at OUTLIER for every token, and training keeps them.
"""

from __future__ import annotations

import ast
import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from agora.core.optional_packages import import_tuning
from agora.data.corpus import open_corpus
from agora.data.sampling import Sampler
from agora.data.text_sources import STDLIB, find_files
from agora.data.tokenizer import ByteTokenizer
from agora.train.memory import keep_freed_memory
from benchmarks.worker import Channel

SEQUENCES: Final = 16  # sequences of a step of pretraining
PEAK_RATE: Final = 3e-3
HELD_OUT: Final = 0.01
SEED: Final = 1
OUTLIER_COLUMNS: Final = (17, 90)
OUTLIER: Final = 30.0


def make_model(sizes: Mapping[str, int]) -> Any:
    """Returns a Qwen2 decoder of bytes with random weights, float32. sizes: keys of its config."""
    transformers = import_tuning("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(SEED)
        config = transformers.Qwen2Config(vocab_size=ByteTokenizer.vocabulary, tie_word_embeddings=False, **sizes)
        return transformers.AutoModelForCausalLM.from_config(config)


@torch.no_grad()
def plant_outliers(model: Any) -> None:
    """Makes OUTLIER_COLUMNS of the residual stream large in every token, and the norms bring all columns to about 1."""
    columns, embedding = list(OUTLIER_COLUMNS), model.model.embed_tokens.weight
    embedding.normal_()
    embedding[:, columns] = OUTLIER
    size = math.sqrt(1 + len(columns) * OUTLIER**2 / embedding.shape[1])
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(size)
            parameter[columns] = size / OUTLIER


def pretrain(model: Any, cache: Path, steps: int) -> float:
    """Trains `model` on the standard library's source for so many steps; returns the mean loss of the last tenth.

    cache: where the tokenized corpus lies.
    """
    context = model.config.max_position_embeddings
    sampler = Sampler(open_corpus([STDLIB], ByteTokenizer(), cache), context, HELD_OUT, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * rate_share(step, steps)
        tokens = torch.from_numpy(sampler.batch(range(step * SEQUENCES, (step + 1) * SEQUENCES))).long()
        loss = next_token_loss(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def rate_share(step: int, steps: int) -> float:
    """Returns the share of the peak learning rate at a step: a warm-up of a twentieth, then a cosine to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def next_token_loss(model: Any, tokens: Tensor) -> Tensor:
    """Returns the mean loss per token, in nats, of token ids [b, s + 1]."""
    logits = model(input_ids=tokens[:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def write_tuned_text(file: Path) -> None:
    """Writes what pretrained models are tuned on: the standard library's docstrings, prose that was rare among code."""
    file.write_text("\n".join(_docstrings(file.parent)), encoding="utf-8")


def _docstrings(folder: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for file in find_files([STDLIB], folder):
        for piece in file.pieces():
            with warnings.catch_warnings(), contextlib.suppress(SyntaxError):  # some files are not Python
                warnings.simplefilter("ignore")
                nodes = [node for node in ast.walk(ast.parse(piece.text)) if isinstance(node, documented)]
                yield from filter(None, map(ast.get_docstring, nodes))


def serve(spec: dict[str, Any], channel: Channel) -> None:
    """{"to": folder, "sizes": {...}, "steps": n, "outliers": bool} writes a bf16 model there, pretrained for n steps.

    It answers {"loss": that of the end of pretraining, None with 0 steps}. {"text": file} writes what is tuned on, and
    answers {}.
    """
    torch.set_num_threads(int(spec["threads"]))
    keep_freed_memory()
    for order in channel.orders():
        if "text" in order:
            write_tuned_text(Path(order["text"]))
            channel.say({})
            continue
        model = make_model(order["sizes"])
        if order["outliers"]:
            plant_outliers(model)
        loss = pretrain(model, Path(spec["cache"]), order["steps"]) if order["steps"] else None
        model.bfloat16().save_pretrained(order["to"])
        channel.say({"loss": loss})
