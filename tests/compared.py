"""A small folder of a comparison, in the format of docs/compare.md. Shared by tests."""

from __future__ import annotations

import json
from pathlib import Path

COLUMNS = (
    "grid,scenario,ranks,servers,variant,strategy,batch,seed,cell,point,step,samples,time_s,"
    "sent_bytes,loss,test_loss,accuracy"
)
VARIANTS = ("synchronous", "gossip", "</b>local")
SEEDS = (0, 1)


def spread(*values):
    known = [one for one in values if one is not None]
    return {
        "mean": sum(known) / len(known) if known else None,
        "least": min(known, default=None),
        "most": max(known, default=None),
        "seeds": dict(zip(map(str, SEEDS), values, strict=True)),
    }


def write_comparison(folder: Path) -> Path:
    """Write a comparison of three strategies at two numbers of ranks, calm and straggling."""
    folder.mkdir(exist_ok=True)
    tables = [_table("calm", 1.0), _table("straggling", 1.7)]
    summary = {
        **{"format": "syncline-compare", "version": 1, "syncline": "0.2.0", "name": "small"},
        **{"clock": "virtual", "target": 0.8, "is_complete": True, "samples": 6400},
        "cells": {"wanted": 24, "done": 24, "failed": 1, "missing": 0},
        **{"job": '[model]\nname = "mlp"\n', "study": "[compare]\n", "cluster": {}},
        **{"seeds": list(SEEDS), "tune": 2, "rules": {"winner": "The first has the best mean."}},
        "tables": tables,
        "failed": [
            {"cell": "x", "variant": "gossip", "ranks": 8, "grid": "g", "scenario": "calm",
             "seed": 1, "why": "a loss was not finite"}
        ],
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [COLUMNS]
    for found in tables:
        for row in found["rows"]:
            lines += [_line(found, row, seed, point) for seed in SEEDS for point in range(5)]
    (folder / "points.csv").write_text("\n".join(lines) + "\n")
    return folder


def _line(found, row, seed, point):
    number = VARIANTS.index(row["variant"]) + 1
    done = (point + 1) * 20
    cells = [
        *(found["grid"], found["scenario"], row["ranks"], 0, row["variant"], row["strategy"]),
        *(64, seed, "c", point, done, done * 64, done * number / row["ranks"], done * 1e4),
        *(
            2 / (point + 1) + 0.1 * seed + 0.01 * row["ranks"],
            "" if point == 2 else 1 / (point + 1),
        ),
        0.9 - 0.5 / (point + 1 + seed),
    ]
    return ",".join(map(str, cells))


def _table(scenario, factor):
    rows, winners = [], []
    for ranks in (4, 8):
        times = {name: factor * (at + 1) * 8 / ranks for at, name in enumerate(VARIANTS)}
        rows += [_row(ranks, name, time_s) for name, time_s in times.items()]
        tied = ["gossip"] if ranks == 8 else []
        words = f"cannot be told apart: synchronous, {tied[0]}" if tied else "synchronous"
        others = [
            {"variant": "gossip", "ratio": 2.0, "low": 1.5, "high": 2.5, "is_behind": not tied,
             "why": ""},
            {"variant": VARIANTS[2], "ratio": None, "low": None, "high": None, "is_behind": True,
             "why": "reached 0 of 2"},
        ]  # fmt: skip
        by = {"first": "synchronous", "tied": tied, "words": words, "others": others}
        nobody = {"first": None, "tied": [], "words": "", "others": []}
        winners.append({"ranks": ranks, "by_time": by, "by_accuracy": by if ranks == 4 else nobody})
    return {
        **{"grid": "fixed batch", "scenario": scenario, "batch_rule": "16 samples on each rank"},
        **{"scenario_words": "no jitter", "ranks": [4, 8], "variants": list(VARIANTS)},
        **{"rows": rows, "winners": winners},
    }


def _row(ranks, name, time_s):
    has = name != VARIANTS[2]
    to_target = spread(time_s * 0.9, time_s * 1.1) if has else spread(None, None)
    final = {"accuracy": spread(0.81, 0.83), "time_s": spread(time_s * 2, time_s * 2.1)}
    return {
        **{"ranks": ranks, "variant": name, "strategy": name, "servers": 0, "batch": 64},
        **{"cells": ["c"], "settings": {"optimizer.lr": 0.1}, "final": final, "failed": 0},
        "tuning": {
            "tried": [{}, {}],
            "scenario": "calm",
            "seed": 3,
            "tuned_keys": ["optimizer.lr"],
        },
        "to_target": {"time_s": to_target, "reached": 2 if has else 0, "of": 2},
    }
