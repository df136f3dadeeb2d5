"""Sequences in a paged cache, driven step by step as a scheduler would.

Also a rank of a tensor-parallel model that drives them and saves its logits:

    python -m tests.engine.paged_rows SETTINGS.json RANK MODEL OUT.pt [DTYPE]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.config import Settings
from engine.exec.batch import ForwardBatch
from engine.exec.kv import KVPool
from engine.model.registry import Model, load_model
from engine.parallel.group import open_group

PAGE_SIZE = 4


class Rows:
    """Sequences in one paged cache, whose pages are handed out in a scattered order."""

    def __init__(self, model: Model, texts: Sequence[Sequence[int]], pages_each: int = 16, dtype: torch.dtype = torch.float32) -> None:
        self.model = model
        self.texts = texts
        self.done = [0] * len(texts)
        total = pages_each * len(texts) + 1
        order = torch.randperm(total - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.tables = order[: pages_each * len(texts)].view(len(texts), pages_each).int()
        config = model.config
        self.kv = KVPool(config.layers, total, PAGE_SIZE, len(model.shard.kv_heads), config.head_dim, dtype)
        self.logits: list[list[torch.Tensor]] = [[] for _ in texts]
        self.steps = 0

    def step(
        self, counts: dict[int, int], wanted: torch.Tensor | None = None, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Give row i its next ``counts[i]`` tokens, in the order of the dict. Keeps and returns the logits of each, or
        returns those of ``wanted`` only."""
        tokens, positions, slots = [], [], []
        for row, count in counts.items():
            where = torch.arange(self.done[row], self.done[row] + count)
            tokens.append(torch.tensor(self.texts[row][self.done[row] : self.done[row] + count]))
            positions.append(where)
            slots.append(self.tables[row][where // PAGE_SIZE].long() * PAGE_SIZE + where % PAGE_SIZE)
            self.done[row] += count
        self.steps += 1
        everything = torch.arange(sum(counts.values()))
        batch = ForwardBatch(
            step=self.steps, tokens=torch.cat(tokens), positions=torch.cat(positions), slots=torch.cat(slots),
            query_lens=tuple(counts.values()), kv_lens=tuple(self.done[row] for row in counts),
            page_tables=self.tables[list(counts)], page_size=PAGE_SIZE, logit_rows=everything if wanted is None else wanted,
        )  # fmt: skip
        batch.check()
        logits = self.model.forward(batch, self.kv, on_layer)
        assert logits.dtype is torch.float32
        assert logits.shape == (len(batch.logit_rows), self.model.config.vocab)
        if wanted is not None:
            return logits
        for row, part in zip(counts, logits.split(list(counts.values())), strict=True):
            self.logits[row].append(part)
        return logits

    def all_logits(self, row: int) -> torch.Tensor:
        return torch.cat(self.logits[row])


def drive(rows: Rows) -> None:
    """Whole prefill, chunks, decode, a verify of several tokens, and all of them mixed in ragged batches."""
    rows.step({0: len(rows.texts[0]) - 6})
    rows.step({1: 9})
    rows.step({2: 5, 0: 1})
    rows.step({1: 13, 0: 1, 2: 4})
    rows.step({0: 1, 1: 1, 2: 1})
    rows.step({2: len(rows.texts[2]) - rows.done[2] - 1, 1: 5, 0: 2})
    rows.step({2: 1, 0: 1})
    rows.step({1: len(rows.texts[1]) - rows.done[1]})


def sample_texts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in (43, 35, 51)]


def main(settings_path: str, rank_text: str, model_path: str, out: str, dtype: str = "float32") -> None:
    torch.set_num_threads(1)
    settings = Settings.from_json(Path(settings_path).read_text())
    group = open_group(settings, int(rank_text), None, torch.device("cpu"))
    model = load_model(model_path, dtype=dtype, group=group, device=torch.device("cpu"))
    print(model.paths())
    rows = Rows(model, sample_texts(model.config.vocab), dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    drive(rows)
    torch.save([rows.all_logits(row) for row in range(len(rows.texts))], out)
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
