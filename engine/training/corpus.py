"""Token sequences to train on: prompts with the target's own responses, and their packing into rows of one length."""

import bisect
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_OPEN_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents end to end. tokens [total] int32; start [n+1] int64; prompt_len [n] int32; temperature [n] float32."""

    tokens: np.ndarray
    start: np.ndarray
    prompt_len: np.ndarray
    temperature: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt_len)

    @property
    def response_tokens(self) -> int:
        return int(self.start[-1] - self.prompt_len.sum())

    @classmethod
    def of(cls, documents: Sequence[tuple[Sequence[int], int, float]]) -> "Corpus":
        """From (tokens, prompt length, temperature) of every document."""
        lengths = [len(tokens) for tokens, _, _ in documents]
        flat = np.fromiter((t for tokens, _, _ in documents for t in tokens), np.int32, sum(lengths))
        return cls(
            tokens=flat,
            start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            prompt_len=np.array([n for _, n, _ in documents], np.int32),
            temperature=np.array([t for _, _, t in documents], np.float32),
        )

    def document(self, index: int) -> np.ndarray:
        return self.tokens[self.start[index] : self.start[index + 1]]

    def subset(self, indices: Sequence[int]) -> "Corpus":
        index = np.asarray(indices, np.int64)
        lengths = np.diff(self.start)[index]
        parts = [self.document(i) for i in indices]
        return Corpus(
            tokens=np.concatenate(parts) if parts else self.tokens[:0],
            start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            prompt_len=self.prompt_len[index],
            temperature=self.temperature[index],
        )

    def save(self, path: Path) -> None:
        """Written beside and renamed, so that a reader never sees half a file."""
        part = path.with_name(path.name + ".part.npz")
        np.savez(part, tokens=self.tokens, start=self.start, prompt_len=self.prompt_len, temperature=self.temperature)
        part.rename(path)

    @classmethod
    def load(cls, paths: Sequence[Path]) -> "Corpus":
        """The documents of several files, in their order.

        Raises:
            ValueError: no files.
        """
        if not paths:
            raise ValueError("no corpus files were given; generate responses first.")
        parts = []
        for path in paths:
            with np.load(path) as file:
                parts.append({name: file[name] for name in ("tokens", "start", "prompt_len", "temperature")})
        lengths = np.concatenate([np.diff(part["start"]) for part in parts])
        return cls(
            tokens=np.concatenate([part["tokens"] for part in parts]),
            start=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            prompt_len=np.concatenate([part["prompt_len"] for part in parts]),
            temperature=np.concatenate([part["temperature"] for part in parts]),
        )


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """N rows of S tokens. Padding tokens are documents of their own without a response.

    tokens_NS int64; doc_start_NS, doc_end_NS: the row positions where the token's document begins and ends (exclusive);
    response_NS: the token was written by the target in response.
    """

    tokens_NS: Tensor
    doc_start_NS: Tensor
    doc_end_NS: Tensor
    response_NS: Tensor

    def __len__(self) -> int:
        return self.tokens_NS.shape[0]

    @property
    def fill(self) -> float:
        """Share of positions that belong to documents."""
        return float((self.doc_end_NS - self.doc_start_NS > 1).float().mean())

    def rows(self, index: Tensor) -> "PackedRows":
        return PackedRows(
            tokens_NS=self.tokens_NS[index],
            doc_start_NS=self.doc_start_NS[index],
            doc_end_NS=self.doc_end_NS[index],
            response_NS=self.response_NS[index],
        )

    def to(self, device: str) -> "PackedRows":
        return PackedRows(
            tokens_NS=self.tokens_NS.to(device),
            doc_start_NS=self.doc_start_NS.to(device),
            doc_end_NS=self.doc_end_NS.to(device),
            response_NS=self.response_NS.to(device),
        )


def assign_rows(lengths: Sequence[int], row_len: int, seed: int) -> list[list[int]]:
    """Documents of every row: in random order, each goes into the fullest open row that still takes it.

    Raises:
        ValueError: a document longer than a row.
    """
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for document in order:
        length = lengths[document]
        if length > row_len:
            raise ValueError(f"a document of {length} tokens does not fit row_len={row_len}.")
        at = bisect.bisect_left(free, (length, -1))
        if at < len(free):
            left, row = free.pop(at)
        else:
            left, row = row_len, len(rows)
            rows.append([])
            if len(free) >= _OPEN_ROWS:
                free.pop(0)
        rows[row].append(document)
        bisect.insort(free, (left - length, row))
    return rows


def pack(corpus: Corpus, *, row_len: int, seed: int, whole_multiple: int = 1) -> PackedRows:
    """Packs all documents; rows of padding are added until their number is a multiple of `whole_multiple`."""
    layout = assign_rows(np.diff(corpus.start).tolist(), row_len, seed)
    count = -(-len(layout) // whole_multiple) * whole_multiple
    tokens = np.zeros((count, row_len), np.int64)
    doc_start = np.broadcast_to(np.arange(row_len), (count, row_len)).copy()
    doc_end = doc_start + 1
    response = np.zeros((count, row_len), bool)
    for row, documents in enumerate(layout):
        at = 0
        for document in documents:
            ids = corpus.document(document)
            end = at + len(ids)
            tokens[row, at:end] = ids
            doc_start[row, at:end] = at
            doc_end[row, at:end] = end
            response[row, at + int(corpus.prompt_len[document]) : end] = True
            at = end
    return PackedRows(
        tokens_NS=torch.from_numpy(tokens),
        doc_start_NS=torch.from_numpy(doc_start),
        doc_end_NS=torch.from_numpy(doc_end),
        response_NS=torch.from_numpy(response),
    )
