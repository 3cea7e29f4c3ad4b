"""The loop people really have: augmentation, dropout, clip, schedule, validation, checkpoints.

    python examples/own_loop.py                            alone
    syncline run --ranks 4 examples/own_loop.py            the same weights, bit for bit
    syncline run --ranks 2 examples/own_loop.py saved.pt   saves on rank 0 as it goes

Kill the last one, and start it again on any number of ranks: it goes on from `saved.pt`, in the
middle of an epoch, to the weights of a run that was never broken.
"""

import hashlib
import os
import random
import sys

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import syncline
from syncline import data

EPOCHS = 5
FILE = sys.argv[1] if len(sys.argv) > 1 else None


class Digits(Dataset):
    """Handwritten digits, moved by a random pixel if they are to train on."""

    def __init__(self, split: data.Split, *, is_moved: bool) -> None:
        samples, labels = split.batch(numpy.arange(len(split)))
        self.samples, self.labels = torch.from_numpy(samples), torch.from_numpy(labels)
        self.is_moved = is_moved

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = self.samples[index]
        if self.is_moved:
            sample = sample.roll((random.randint(-1, 1), random.randint(-1, 1)), (1, 2))
        return sample, self.labels[index]


def validate() -> float:
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in test)
    model.train()
    return right / len(digits.test)


def save() -> None:
    if FILE and syncline.rank() == 0:  # on one rank alone, as usual
        torch.save({name: part.state_dict() for name, part in parts.items()}, FILE + ".new")
        os.replace(FILE + ".new", FILE)


syncline.init(threads=1)
digits = data.load("digits")
loader = DataLoader(
    Digits(digits.train, is_moved=True),
    batch_size=16,  # of one shard: a step takes 8 shards
    shuffle=True,
    num_workers=1,
    persistent_workers=True,
)
test = DataLoader(Digits(digits.test, is_moved=False), batch_size=60)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
    nn.Linear(16 * 36, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)

syncline.distribute(model, optimizer, shards=8)  # fixes the arithmetic, on any number of ranks
steps = syncline.shards(loader)

parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": steps}
if FILE and os.path.exists(FILE):
    saved = torch.load(FILE, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])

for epoch in range(steps.epoch, EPOCHS):
    for number, step in enumerate(steps, start=1):
        for x, y in step:  # this rank's shards
            nn.functional.cross_entropy(model(x), y).backward()
        syncline.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 4 == 0:
            save()
    scheduler.step()
    accuracy = validate()
    if syncline.rank() == 0:
        print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)

if syncline.rank() == 0:
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"{syncline.world_size()} ranks, accuracy {validate():.3f}, weights {digest}")
