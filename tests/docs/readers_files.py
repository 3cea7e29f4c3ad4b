"""Files that a reader of the pages is meant to have: a script and a job, both short."""

from __future__ import annotations

from pages import ROOT

SCRIPT = """
import torch
import syncline

syncline.init(threads=1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
syncline.distribute(model, optimizer, shards=6)
batches = syncline.shards(lambda: torch.randn(2, 4))
for step in range(20):
    for x in next(batches):
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DIGITS = (ROOT / "examples" / "digits.toml").read_text()
SHORT = DIGITS.replace("epochs = 20 ", "steps = 21 ").replace("every = 110", "every = 10")
"""A job that takes a second instead of half a minute."""
