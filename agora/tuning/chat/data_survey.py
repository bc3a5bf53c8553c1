"""Counts what training would make of a data file: samples, tokens, lengths, truncation, packing; keeps some samples."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agora.data.tokenizer import JsonTokenizer
from agora.tuning.chat.model_tokenizer import ModelTokenizer
from agora.tuning.chat.sample_file import SampleFiles
from agora.tuning.chat.sample_formats import Objective, ReadingCounts
from agora.tuning.chat.sample_rows import assign_rows
from agora.tuning.chat.supervision import TokenSample, tokenise

REPORT_EVERY = 1000


@dataclass(frozen=True, slots=True)
class LengthBin:
    """How many samples have `first` to `last` tokens, both included."""

    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True)
class DataSurvey:
    """Statistics of a data file as training with this objective and context would use it.

    | field             | value                                                                                     |
    |-------------------|-------------------------------------------------------------------------------------------|
    | context           | targets of a row; a row has one token more                                                |
    | lengths           | tokens of each sample before truncation [n]; of a preference, those of its longer side    |
    | tokens            | tokens kept in samples that are not left out, of both sides of a preference               |
    | supervised        | how many of these are supervised                                                          |
    | truncated_samples | samples that were truncated                                                               |
    | truncated_tokens  | tokens that truncation removed                                                            |
    | left_out          | samples without a supervised token, after truncation, on some side, or with equal sides   |
    | duplicates        | samples with the tokens of an earlier one                                                 |
    | unknown           | tokens, of all samples, that stand for text for which the tokenizer has none              |
    | counts            | what was left out while reading, and empty answers                                        |
    | rows              | rows of context + 1 tokens that the other samples fill; None for dpo: pairs are not packed |
    | efficiency        | the fraction of the rows' places that hold a token; None without rows                     |
    | shown             | the first samples of the file                                                             |
    """

    objective: Objective
    context: int
    lengths: NDArray[np.int64]
    tokens: int
    supervised: int
    truncated_samples: int
    truncated_tokens: int
    left_out: int
    duplicates: int
    counts: ReadingCounts
    rows: int | None
    efficiency: float | None
    shown: tuple[TokenSample, ...]
    unknown: int = 0

    @property
    def samples(self) -> int:
        return len(self.lengths)

    def histogram(self) -> list[LengthBin]:
        """Bins 0 to 1, 2, 3 to 4, 5 to 8, ... from the shortest sample's to the longest's."""
        if not len(self.lengths):
            return []
        bits = np.frexp(np.maximum(self.lengths, 1) - 0.5)[1].clip(0)  # 2**(bits - 1) < length <= 2**bits
        counts = np.bincount(bits)
        bins = [LengthBin((1 << (bit - 1)) + 1 if bit else 0, 1 << bit, int(count)) for bit, count in enumerate(counts)]
        return bins[int(bits.min()) :]


def survey(
    file: SampleFiles, tokenizer: ModelTokenizer, context: int, shown: int, progress: Callable[[int], None]
) -> DataSurvey:
    """Reads all samples once, one at a time in memory, and returns their statistics.

    Samples are truncated to context + 1 tokens, except for the objective lm: there a document is cut where a row is
    full, and goes on in the next. shown: how many of the first samples the survey keeps. progress: called every
    REPORT_EVERY samples with the number counted so far. Raises what `tokenise` raises.
    """
    counts = ReadingCounts()
    seen: set[bytes] = set()
    unknown_id = tokenizer.tokenizer.unknown_id if isinstance(tokenizer.tokenizer, JsonTokenizer) else None
    duplicates = unknown = 0
    lengths = array("q")
    kept = array("q")
    tokens = supervised = truncated_samples = truncated_tokens = left_out = 0
    first: list[TokenSample] = []
    for number, sample in enumerate(tokenise(file, counts, tokenizer, context + 1), 1):
        if number <= shown:
            first.append(sample)
        digest = hashlib.blake2b(b"".join(part.ids.tobytes() + b"|" for part in sample), digest_size=8).digest()
        duplicates += digest in seen
        seen.add(digest)
        if unknown_id is not None:
            unknown += sum(int(np.count_nonzero(part.ids == unknown_id)) for part in sample)
        lengths.append(max(len(part.ids) + part.truncated for part in sample))
        cut = sum(part.truncated for part in sample)
        truncated_tokens += cut
        truncated_samples += cut > 0
        learnt = [int(np.count_nonzero(part.supervised)) for part in sample]
        if all(learnt):
            kept.extend(len(part.ids) for part in sample)
            tokens += sum(len(part.ids) for part in sample)
            supervised += sum(learnt)
        else:
            left_out += 1
        if number % REPORT_EVERY == 0:
            progress(number)
    rows = _count_rows(np.array(kept, np.int64), file.objective, context + 1)
    return DataSurvey(
        objective=file.objective,
        context=context,
        lengths=np.array(lengths, np.int64),
        tokens=tokens,
        supervised=supervised,
        truncated_samples=truncated_samples,
        truncated_tokens=truncated_tokens,
        left_out=left_out,
        duplicates=duplicates,
        unknown=unknown,
        counts=counts,
        rows=rows,
        efficiency=tokens / (rows * (context + 1)) if rows else None,
        shown=tuple(first),
    )


def _count_rows(lengths: NDArray[np.int64], objective: Objective, row_tokens: int) -> int | None:
    match objective:
        case "dpo":
            return None
        case "lm":
            return -(-int(lengths.sum()) // row_tokens)
        case "sft":
            return len(assign_rows(lengths, row_tokens))
