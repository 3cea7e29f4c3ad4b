"""An ordinary PyTorch loop with the three added lines.

    python examples/plain_loop.py                              alone
    torchrun --nproc-per-node 2 examples/plain_loop.py         two ranks, torch's launcher
    syncline run --ranks 2 examples/plain_loop.py              two ranks, ours

Own model, own DataLoader, nothing else to learn. Rank 0 prints the result. A step takes one batch
from each rank, as with DDP, so the result depends on the number of ranks; `shards=` in
`own_loop.py` makes it the same on any number.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import syncline

syncline.init(threads=1)  # (1) join the job


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(20, 64)
        self.out = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(x)))


# Points in 20 dimensions; the class is which side of a bent surface they lie on.
generator = torch.Generator().manual_seed(0)
points = torch.randn(4096, 20, generator=generator)
classes = (points[:, :10].square().sum(1) > points[:, 10:].square().sum(1)).long()
train = TensorDataset(points[:3584], classes[:3584])
test_points, test_classes = points[3584:], classes[3584:]

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
loader = DataLoader(train, batch_size=32, shuffle=True)

syncline.distribute(model, optimizer)  # (2) spread the training, in place

batches = syncline.shard(loader)  # (3) this rank's part of the data
for _ in range(20):
    model.train()
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()

model.eval()
with torch.no_grad():
    accuracy = (model(test_points).argmax(1) == test_classes).float().mean().item()
if syncline.rank() == 0:
    print(f"{syncline.world_size()} ranks, accuracy {accuracy:.3f}")
