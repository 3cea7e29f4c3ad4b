"""Event files for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch.utils.tensorboard.writer import SummaryWriter

from syncline.loggers.base import Line, Opening


class TensorBoard:
    """A folder of event files. A run that goes on adds a file to the same folder."""

    identity = None

    def __init__(self, opening: Opening) -> None:
        folder = opening.where or str((opening.folder or Path("runs")) / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=opening.first_step)
        if opening.config:
            text = "".join(f"    {key} = {value}\n" for key, value in opening.config.items())
            self._writer.add_text("config", text, opening.first_step)

    def write(self, lines: Sequence[Line]) -> None:
        for step, values in lines:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()
