"""The README's code, as it stands, keeps the README's promise."""

from __future__ import annotations

import hashlib
import os
import random
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ranks import collect, run_ranks, start_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

README = Path(__file__).parent.parent / "README.md"
EPOCHS = 3


class Broken(Exception):
    """Ends a run in the middle."""


class Points(Dataset):
    """Random points with random noise, as augmentation adds it."""

    def __init__(self, breaks_when_saved: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = torch.randn(64, 6, generator=generator)
        self.breaks_when_saved = breaks_when_saved

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.breaks_when_saved and os.path.exists("saved.pt"):
            raise Broken
        noise = random.random() + torch.rand(6)
        return self.points[index] + 0.1 * noise, index % 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 3)
    )


def run_block(folder: Path, *, breaks_when_saved: bool = False) -> str:
    """Run the README's first block of Python in a folder; return a digest of the weights."""
    (block, *_) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    os.chdir(folder)
    names = {
        "make_model": make_model,
        "make_loader": lambda: DataLoader(Points(breaks_when_saved), batch_size=2, shuffle=True),
        "EPOCHS": EPOCHS,
    }
    exec(block, names)
    values = names["model"].state_dict().values()
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()


def on(ranks: int, folder: Path) -> set[str]:
    folder.mkdir(exist_ok=True)
    return set(run_ranks(ranks, lambda: run_block(folder)))


def test_it_has_the_same_bits_on_any_number_of_ranks(tmp_path):
    found = {ranks: on(ranks, tmp_path / str(ranks)) for ranks in (1, 2, 3, 4, 8)}
    assert len(set.union(*found.values())) == 1, found


def test_it_goes_on_elsewhere_to_the_bits_of_an_unbroken_run(tmp_path):
    expected = on(1, tmp_path / "unbroken")
    folder = tmp_path / "broken"
    folder.mkdir()
    collect(*start_ranks(2, lambda: run_block(folder, breaks_when_saved=True)))
    saved = torch.load(folder / "saved.pt", weights_only=True)
    assert saved["loader"]["epoch"] == 1  # two epochs are left
    assert on(3, folder) == expected
