"""Loggers: TensorBoard, W&B and MLflow, each in a small file and with an extra of its name.

`run.log` of a job names those of `syncline train`; scripts use `Log`:

    from syncline.loggers import Log

names.py         which there are, and whether they are installed
base.py          what a logger is
log.py           `Log`, which the run does not wait for
tensorboard.py, wandb.py, mlflow.py
"""

from syncline.loggers.log import Log
from syncline.loggers.names import LOGGERS, check_installed

__all__ = ["LOGGERS", "Log", "check_installed"]
