"""Every Python block of the pages runs as it stands.

A block is run in forked ranks, with the names that its page takes for granted. Blocks of training
loops must give the same bits on 1, 2 and 4 ranks. `REDUCED` has what is shortened, and why. Blocks
with a title are files of a tutorial: the commands of their page run them.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lab.network import why_not
from readers_files import SCRIPT, SHORT
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import syncline
from command import Started
from pages import ROOT, Block, pages
from ranks import collect, run_ranks, start_ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

BLOCKS = [
    block
    for page in pages()
    for block in page.blocks
    if block.language == "python" and not block.title
]
README_EPOCHS = 3

REDUCED = [
    ("found.cases:", "found.cases[:2]:", "226 traces"),
    ("Lab(machines=4", "Lab(machines=2", "eight ranks"),
    ("lab.cut(3)", "lab.cut(1)", "the same"),
    ('["script.py"], ranks=2', '["script.py"], ranks=1', "eight ranks"),
]
"""What is replaced in a block, and what it would take as it stands."""


def block_with(text: str) -> Block:
    (found,) = [block for block in BLOCKS if text in block.text]
    return found


def code_of(text: str) -> str:
    code = block_with(text).text
    for before, after, _ in REDUCED:
        code = code.replace(before, after)
    return code


class Broken(Exception):
    """Ends a run in the middle."""


class NoisyPoints(Dataset):
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


def points(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(num_samples, 3, generator=generator), torch.arange(num_samples) % 5
    )


def make_noisy_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 3)
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


def spread(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer, syncline.Replica]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, syncline.distribute(model, optimizer, shards=4)


def begun(names: dict) -> syncline.Replica:
    """Give a script that has called `distribute`."""
    syncline.init(threads=1)
    torch.manual_seed(0)
    names["model"], names["optimizer"], replica = spread(make_model())
    return replica


def draw() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3), torch.randint(5, (4,))


def readme(names: dict, *, breaks_when_saved: bool = False) -> list[str]:
    names["make_model"] = make_noisy_model
    names["make_loader"] = lambda: DataLoader(
        NoisyPoints(breaks_when_saved), batch_size=2, shuffle=True
    )
    names["EPOCHS"] = README_EPOCHS
    return ["model"]


def plain(names: dict) -> list[str]:
    names |= {"make_model": make_model, "dataset": points(51), "EPOCHS": 3}
    return ["model", "average"]


def metrics(names: dict) -> list[str]:
    begun(names)
    names["test_loader"] = DataLoader(points(53), batch_size=2)
    return ["right", "total"]


def cut_by_hand(names: dict) -> list[str]:
    syncline.init(threads=1)
    torch.manual_seed(0)
    names["columns"] = torch.randint(7, (21, 8))
    names["model"], names["optimizer"], _ = spread(TextModel())
    return ["model"]


def drawn(names: dict) -> list[str]:
    begun(names)
    names |= {"draw": draw, "STEPS": 4}
    return ["model"]


def drawn_by_split(names: dict) -> list[str]:
    begun(names)
    names["get_batch"] = lambda split: draw()
    names["loss_of"] = nn.functional.cross_entropy
    names["step_number"] = 996
    return ["model"]


def two_models(names: dict) -> list[str]:
    syncline.init(threads=1)
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    names["maker"], names["maker_optimizer"], _ = spread(maker)
    names["critic"], names["critic_optimizer"], _ = spread(nn.Linear(3, 1))
    names["loader"] = DataLoader(points(40), batch_size=2)
    return ["maker", "critic"]


LOOPS: dict[Callable[[dict], list[str]], str] = {
    readme: 'if os.path.exists("saved.pt")',
    plain: "AveragedModel(",
    metrics: "sum_over_ranks(",
    cut_by_hand: "batch_size=None",
    drawn: "syncline.shards(draw)",
    drawn_by_split: "get_batch(",
    two_models: "maker_optimizer",
}
"""Loops that have the same bits on any number of ranks, and words of their block."""


def taken_step(names: dict) -> None:
    replica = begun(names)
    for x, y in next(syncline.shards(draw)):
        nn.functional.cross_entropy(names["model"](x), y).backward()
    names["optimizer"].step()
    names["replica"] = replica


def saved_loop(names: dict) -> None:
    begun(names)
    names["loader"], names["epochs"] = DataLoader(points(40), batch_size=2), 2
    names["scheduler"] = torch.optim.lr_scheduler.LinearLR(names["optimizer"])


def split_layers(names: dict) -> None:
    syncline.init(threads=1)
    names["model"] = make_model()
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    names["parts"] = {"model": names["model"]}


def profiled(names: dict) -> None:
    names["loader"] = DataLoader(points(40), batch_size=4)


def traced(names: dict) -> None:
    Path("job.toml").write_text(SHORT)
    command = ("simulate", "job.toml", "--ranks", "4", "--trace", "run.trace")
    assert Started(*command, traced=False).wait() == 0
    names["factors"] = np.ones((2, 4, 10))


def measured_runs(names: dict) -> None:
    Path("datasets").symlink_to(ROOT / "datasets")


def logged(names: dict) -> None:
    pytest.importorskip("tensorboard")


def with_lab(names: dict) -> None:
    Path("script.py").write_text(SCRIPT)


ONCE: dict[Callable[[dict], None], str] = {
    taken_step: "# on every rank, after a step",
    saved_loop: "part.load_state_dict(saved[name])",
    split_layers: "HybridSettings(groups=1)",
    profiled: "with profile(",
    traced: "compile_trace(",
    measured_runs: "dataset.load(",
    with_lab: "with Lab(",
    logged: "with Log(",
}
"""Blocks that are run once, and words of them."""


def test_every_block_is_run_here():
    assert sorted(block_with(text).line for text in (*LOOPS.values(), *ONCE.values())) == sorted(
        block.line for block in BLOCKS
    )


def given_names() -> dict:
    return {"torch": torch, "nn": nn, "DataLoader": DataLoader, "syncline": syncline}


def digest(value: object) -> object:
    if not isinstance(value, nn.Module):
        return value
    values = value.state_dict().values()
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in values)).hexdigest()


def run_loop(prepare: Callable[[dict], list[str]], folder: Path, **settings: bool) -> tuple:
    """Run a loop's block on this rank; say which of its results changed, and what they are."""
    os.chdir(folder)
    names = given_names()
    wanted = prepare(names, **settings)
    before = [digest(names.get(name)) for name in wanted]
    exec(code_of(LOOPS[prepare]), names)
    after = [digest(names[name]) for name in wanted]
    return [one != two for one, two in zip(before, after, strict=True)], after


def on(ranks: int, prepare: Callable[[dict], list[str]], folder: Path) -> list:
    folder.mkdir(exist_ok=True)
    return run_ranks(ranks, lambda: run_loop(prepare, folder))


@pytest.mark.parametrize("prepare", LOOPS, ids=lambda prepare: prepare.__name__)
def test_a_loop_has_the_same_bits_on_any_number_of_ranks(prepare, tmp_path):
    numbers = (1, 2, 3, 4, 8) if prepare is readme else (1, 2, 4)
    found = [one for ranks in numbers for one in on(ranks, prepare, tmp_path / str(ranks))]
    assert found == [found[0]] * sum(numbers)
    assert all(found[0][0])
    if prepare is metrics:
        assert found[0][1][1] == 48  # 53 samples are 6 whole steps of 4 shards of 2


def test_the_readme_goes_on_elsewhere_to_the_bits_of_an_unbroken_run(tmp_path):
    expected = on(1, readme, tmp_path / "unbroken")[0]
    folder = tmp_path / "broken"
    folder.mkdir()
    collect(*start_ranks(2, lambda: run_loop(readme, folder, breaks_when_saved=True)))
    saved = torch.load(folder / "saved.pt", weights_only=True)
    assert saved["loader"]["epoch"] == 1  # two epochs are left
    assert on(3, readme, folder) == [expected] * 3


@pytest.mark.parametrize("prepare", ONCE, ids=lambda prepare: prepare.__name__)
def test_a_block_runs(prepare, tmp_path):
    if prepare is with_lab and why_not() is not None:
        pytest.skip(f"{block_with(ONCE[prepare]).page}: {why_not()}")

    def work() -> None:
        os.chdir(tmp_path)
        names = given_names()
        prepare(names)
        exec(code_of(ONCE[prepare]), names)

    run_ranks(1, work)
