"""The Python blocks of docs/porting.md run as they stand: equal bits on 1, 2 and 4 ranks."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline
from ranks import run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

PAGE = Path(__file__).parent.parent / "docs" / "porting.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def block_with(text: str) -> str:
    (found,) = [block for block in BLOCKS if text in block]
    return found


def points(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(num_samples, 3, generator=generator), torch.arange(num_samples) % 5
    )


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))


class TextModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.rnn = nn.GRU(6, 6, dropout=0.1, num_layers=2)
        self.scores = nn.Linear(6, 7)

    def forward(self, x, hidden):
        out, hidden = self.rnn(self.embedding(x), hidden)
        return self.scores(out), hidden


def spread(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer, object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, syncline.distribute(model, optimizer, shards=4)


def draw() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3), torch.randint(5, (4,))


def plain(names: dict) -> list[str]:
    names |= {"make_model": make_model, "dataset": points(51), "EPOCHS": 3}
    return ["model", "average"]


def metrics(names: dict) -> list[str]:
    syncline.init(threads=1)
    torch.manual_seed(0)
    names["model"], *_ = spread(make_model())
    names["test_loader"] = DataLoader(points(53), batch_size=2)
    return ["right", "total"]


def cut_by_hand(names: dict) -> list[str]:
    syncline.init(threads=1)
    torch.manual_seed(0)
    names["columns"] = torch.randint(7, (21, 8))
    names["model"], names["optimizer"], _ = spread(TextModel())
    return ["model"]


def drawn(names: dict) -> list[str]:
    syncline.init(threads=1)
    torch.manual_seed(0)
    names["model"], names["optimizer"], _ = spread(make_model())
    names |= {"draw": draw, "STEPS": 4}
    return ["model"]


def two_models(names: dict) -> list[str]:
    syncline.init(threads=1)
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    names["maker"], names["maker_optimizer"], _ = spread(maker)
    names["critic"], names["critic_optimizer"], _ = spread(nn.Linear(3, 1))
    names["loader"] = DataLoader(points(40), batch_size=2)
    return ["maker", "critic"]


KINDS = {
    plain: "AveragedModel(",
    metrics: "sum_over_ranks(",
    cut_by_hand: "batch_size=None",
    drawn: "syncline.shards(draw)",
    two_models: "maker_optimizer",
}


def test_every_block_of_the_page_is_run_here():
    assert sorted(map(block_with, KINDS.values())) == sorted(BLOCKS)


def digest(value: object) -> object:
    if not isinstance(value, nn.Module):
        return value
    values = value.state_dict().values()
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in values)).hexdigest()


@pytest.mark.parametrize("prepare", KINDS, ids=lambda prepare: prepare.__name__)
def test_a_block_has_the_same_bits_on_any_number_of_ranks(prepare, tmp_path):
    def work():
        os.chdir(tmp_path)
        names = {"torch": torch, "nn": nn, "DataLoader": DataLoader, "syncline": syncline}
        wanted = prepare(names)
        before = [digest(names.get(name)) for name in wanted]
        exec(block_with(KINDS[prepare]), names)
        after = [digest(names[name]) for name in wanted]
        return [one != two for one, two in zip(before, after, strict=True)], after

    found = [one for ranks in (1, 2, 4) for one in run_ranks(ranks, work)]
    assert found == [found[0]] * 7
    assert all(found[0][0])
    if prepare is metrics:
        assert found[0][1][1] == 48  # 53 samples are 6 whole steps of 4 shards of 2
