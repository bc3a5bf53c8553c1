"""The plain training loop that swarms are compared with, and the evaluator of both: a child process with all threads.

The loop has no codec, no peers and no staleness; the optimizer step is the daemons' own, so that both have the same
optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from agora_protocol.ids import MicrobatchId, PeerId, Span
from agora_protocol.manifest import Manifest
from safetensors.torch import load_file
from torch import Tensor

from agora.core.step_instructions import StepInstructions
from agora.data.corpus import open_corpus
from agora.data.sampling import Sampler, sample_id
from agora.data.tokenizer import ByteTokenizer
from agora.train.device import choose_device, has_native_bf16
from agora.train.memory import keep_freed_memory
from agora.train.objectives import TokenBatch, stage_loss
from agora.train.span_trainer import SpanTrainer
from agora.train.weight_versions import DecodedWork
from benchmarks.worker import Channel

ORIGIN: Final = PeerId("plain loop")
NO_MICROBATCH: Final = MicrobatchId(bytes(16))
# Sequences of one forward and backward, of which `calibrate` chooses one; a step's gradient is the same for all.
CHUNKS: Final = (8, 16, 32, 64)


class PlainLoop:
    """The whole model in one process: takes optimizer steps, and evaluates its own weights or those of a swarm."""

    def __init__(self, manifest: Manifest, cache: Path, chunk: int = CHUNKS[0]) -> None:
        """manifest: with one stage. cache: where the tokenized corpus lies. chunk: sequences of one forward."""
        corpus = open_corpus(manifest.data.corpus, ByteTokenizer(), cache_dir=cache)
        self._sampler = Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed)
        self._manifest, self._device = manifest, choose_device("auto")
        trainer = SpanTrainer(manifest, Span(0, 0), self._device, report=lambda event: None, in_flight=1)
        self._trainer, self._stage = trainer, trainer.stages[0]
        self._stage.set_instructions(StepInstructions(manifest.optimizer.target_tokens))
        self._module = self._stage.weights.current.module
        self._chunk = chunk
        for parameter, gradient in zip(
            self._stage.weights.current.parameters, self._stage.gradient_sum.tensors, strict=True
        ):  # the backward adds to the sum itself
            parameter.grad = gradient

    @property
    def sequences(self) -> int:
        return self._manifest.optimizer.target_tokens // self._manifest.model.context

    @property
    def step_tokens(self) -> int:
        return self.sequences * self._manifest.model.context

    def compile(self) -> None:
        """Compiles the model for the steps from here on; the first one takes as long as that does."""
        self._module.compile(dynamic=False)

    def draw(self, first: int, count: int) -> Tensor:
        """Returns `count` samples from number `first` on, token ids [count, s + 1], on the device."""
        ids = [sample_id(ORIGIN, number) for number in range(first, first + count)]
        return torch.from_numpy(self._sampler.batch(ids)).long().to(self._device)

    def take_step(self) -> None:
        """Takes the next optimizer step, on samples that no step had before."""
        tokens = self.draw(self._stage.step * self.sequences, self.sequences)
        loss = self.add_gradients(tokens)
        self._stage.record_microbatch("", tokens[:, 1:].numel(), loss, self._stage.step)
        self._stage.step_or_close_share()

    def add_gradients(self, tokens: Tensor) -> float:
        """Adds the gradients of token ids [b, s + 1] to the step's sum. Returns the loss, summed over tokens."""
        losses = []
        for chunk in torch.split(tokens, self._chunk):
            with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=has_native_bf16(self._device)):
                logits = self._module(chunk[:, :-1], chunk[:, :-1])
            loss = stage_loss(logits, chunk[:, 1:])
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the weights that `loss` uses by those of all stages of a run, or by the averages that it keeps.

        Raises ValueError when a tensor is missing or unknown.
        """
        own = dict(self._stage.evaluation_weights.module.named_parameters())
        if strange := {name for name, parameter in own.items() if parameter.requires_grad} ^ tensors.keys():
            raise ValueError(f"the stages' files and the model differ in {', '.join(sorted(strange))}")
        with torch.no_grad():
            for name, values in tensors.items():
                own[name].copy_(values)

    def loss(self, batches: int) -> float:
        """Returns the mean loss per held-out token, in nats, over so many microbatches: of the averaged weights."""
        loss_sum, count = 0.0, 0
        for windows in self._sampler.heldout_batches(self._manifest.schedule.microbatch, limit=batches):
            batch = TokenBatch.from_wire(torch.from_numpy(windows).long(), has_marks=False, device=self._device)
            done = self._trainer.run_last_stages(DecodedWork(NO_MICROBATCH, 0, batch.inputs, batch, "evaluate"))
            loss_sum, count = loss_sum + done.loss_sum, count + done.tokens
        return loss_sum / count


def calibrate(manifest: Manifest, cache: Path, seconds: float) -> tuple[int, float]:
    """Returns the chunk with which forward and backward are fastest here, and its tokens per second."""
    rates: dict[int, float] = {}
    for chunk in CHUNKS:
        loop = PlainLoop(manifest, cache, chunk)
        tokens = loop.draw(0, chunk)
        loop.add_gradients(tokens)  # warms caches and allocators up
        began, count = time.perf_counter(), 0
        while not count or time.perf_counter() - began < seconds:
            loop.add_gradients(tokens)
            count += tokens[:, 1:].numel()
        rates[chunk] = count / (time.perf_counter() - began)
    best = max(rates, key=lambda chunk: rates[chunk])
    return best, rates[best]


def train(loop: PlainLoop, target: int, ends: Sequence[int], batches: int) -> list[tuple[int, float, float]]:
    """Trains; returns (tokens, seconds, held-out loss) before it and after each number of steps in `ends`, rising.

    target: tokens of a step. Evaluations take no time.
    """
    points, seconds, steps = [(0, 0.0, loop.loss(batches))], 0.0, 0
    for end in ends:
        began = time.perf_counter()
        for _ in range(steps, end):
            loop.take_step()
        seconds += time.perf_counter() - began
        steps = end
        points.append((steps * target, seconds, loop.loss(batches)))
    return points


def evaluate(loop: PlainLoop, models: Sequence[Sequence[str]], batches: int) -> list[float]:
    """Returns the held-out loss of each model: the weights files of its stages."""
    losses = []
    for files in models:
        loop.load({name: values for file in files for name, values in load_file(file).items()})
        losses.append(loop.loss(batches))
    return losses


def serve(spec: dict[str, Any], channel: Channel) -> None:
    """Takes orders with `manifest`, the file of a manifest with one stage; `heldout` is in microbatches.

    {"calibrate": seconds} answers {"chunk", "rate"}; {"train": [steps of each point], "chunk", "heldout"} {"points"};
    {"evaluate": [[file of each stage]], "heldout"} {"losses"}.
    """
    torch.set_num_threads(int(spec["threads"]))
    keep_freed_memory()
    cache = Path(spec["cache"])
    for order in channel.orders():
        manifest = Manifest.from_toml(Path(order["manifest"]).read_text(encoding="utf-8"), order["manifest"])
        if "calibrate" in order:
            chunk, rate = calibrate(manifest, cache, order["calibrate"])
            channel.say({"chunk": chunk, "rate": rate})
        elif "train" in order:
            loop, target = PlainLoop(manifest, cache, order["chunk"]), manifest.optimizer.target_tokens
            channel.say({"points": train(loop, target, order["train"], order["heldout"])})
        else:
            channel.say({"losses": evaluate(PlainLoop(manifest, cache), order["evaluate"], order["heldout"])})
