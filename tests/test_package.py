"""The package as a whole: its names, who may import whom, how long files are, examples."""

from __future__ import annotations

import ast
import doctest
import graphlib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import syncline

SOURCE = Path(syncline.__file__).parent

# Lower numbers are lower layers; a module imports only from its own layer or below.
LAYERS = {
    "errors": 0,
    "seeds": 0,
    "resources": 0,
    "machine_limits": 0,
    "files": 0,
    "faults": 0,
    "sizes": 0,
    "result": 0,
    "own_functions": 0,
    "strategies.settings": 0,
    "strategies.group_settings": 0,
    "strategies.server_settings": 0,
    "linear_layers": 0,
    "device": 0,
    "strategies.registry": 0,
    "comm.shape": 0,
    "comm.group_numbers": 0,
    "cluster_facts": 0,
    "presets": 0,
    "config": 1,
    "launch": 1,
    "freed_memory": 1,
    "loggers": 1,
    "models": 1,
    "data": 1,
    "perf": 1,
    "virtual": 1,
    "workload": 1,
    "cluster": 1,
    "cluster_file": 1,
    "losses": 1,
    "run_folder": 2,
    "run_curve": 2,
    "run_lock": 2,
    "comm": 2,
    "groups": 2,
    "dataset": 2,
    "perf.formulas": 2,
    "contract": 3,
    "engine": 4,
    "strategies": 5,
    "samples": 1,
    "position": 1,
    "like_loader": 1,
    "step_batches": 5,
    "loader": 5,
    "draws": 5,
    "replica": 5,
    "session": 6,
    "sharding": 6,
    "checkpoint": 6,
    "report": 6,
    "recipe": 6,
    "evaluation": 6,
    "evaluation_log": 6,
    "input": 6,
    "loader_process": 6,
    "same_data": 6,
    "own_functions_trial": 6,
    "verify": 6,
    "run_checkpoints": 6,
    "run_ranks": 6,
    "run_trace": 6,
    "run_log": 6,
    "run_figures": 6,
    "injected_faults": 6,
    "not_finite": 6,
    "leaders_report": 6,
    "settings_choice": 6,
    "api": 7,
    "train": 7,
    "measure": 5,
    "measure.trials": 6,
    "measure.layers": 6,
    "measure.validation": 7,
    "measure.as_run": 6,
    "sim": 7,
    "compare": 7,
    "cli": 8,
    "__init__": 9,
    "__main__": 9,
}

# Three uses of the same engine: none may import another. What two of them need lies below them.
INDEPENDENT = ("syncline.api", "syncline.train", "syncline.sim")

MAX_LINES = 350  # what a reader takes in at one sitting
LONGER = {  # file: most lines it may have, and why it is longer than the others
    "comm/streams.py": (600, "one protocol, both its ends"),
    "train.py": (390, "the built-in loop, read top to bottom"),
    "engine/steps.py": (360, "one step on the comm lane, read top to bottom"),
}
STALE_LINES = 40  # a bound so far above its file no longer holds anything


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


NAMES = {name for name, _ in modules()}


def layer(name: str) -> int:
    parts = name.split(".")
    own = ".".join(parts[1:3])
    return LAYERS[own] if own in LAYERS else LAYERS[parts[1] if len(parts) > 1 else "__init__"]


def imports_of(path: Path):
    """Yield what a module imports when it runs; what only types need does not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                is_module = node.module == "syncline" or inside in NAMES
                yield inside if is_module else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_go_downwards_only():
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules()
        for imported in imports_of(path)
        if imported.startswith("syncline.") and layer(imported) > layer(name)
    ]
    assert wrong == []


def is_in(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


def test_scripts_trainer_and_simulator_do_not_know_each_other():
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules()
        for own in INDEPENDENT
        if is_in(name, own)
        for imported in imports_of(path)
        for other in INDEPENDENT
        if other != own and is_in(imported, other)
    ]
    assert wrong == []


def test_no_module_imports_itself_through_others():
    graph = {name: NAMES & set(imports_of(path)) for name, path in modules()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_files_stay_short():
    lines = {
        path.relative_to(SOURCE).as_posix(): len(path.read_text().splitlines())
        for _, path in modules()
    }
    too_long = {
        file: found for file, found in lines.items() if found > LONGER.get(file, (MAX_LINES,))[0]
    }
    assert too_long == {}, "split the file along what it does, or give a reason in LONGER"
    stale = {
        file: (bound, lines.get(file))
        for file, (bound, _) in LONGER.items()
        if lines.get(file, 0) <= max(MAX_LINES, bound - STALE_LINES)
    }
    assert stale == {}, "lower these bounds, or take them out of LONGER"


def test_strategies_know_neither_launcher_nor_command_line():
    for name, path in modules():
        if name.startswith("syncline.strategies."):
            for imported in imports_of(path):
                assert not imported.startswith(
                    ("syncline.launch", "syncline.cli", "syncline.train")
                )


def test_nobody_unpickles():
    for name, path in modules():
        assert not {"pickle", "cloudpickle", "marshal", "shelve"} & set(imports_of(path)), name
        assert "torch.load" not in path.read_text(), name


def test_the_environment_is_read_in_one_place():
    readers = [
        name
        for name, path in modules()
        if "os.environ[" in path.read_text()
        or "os.environ.get" in path.read_text()
        or "getenv" in path.read_text()
    ]
    assert readers in ([], ["syncline.launch.env"])


def test_public_names_are_pinned():
    assert syncline.__all__ == [
        "Job",
        "Replica",
        "SynclineError",
        "__version__",
        "barrier",
        "clip_grad_norm_",
        "clip_grad_value_",
        "discard_gradients",
        "distribute",
        "init",
        "load_optimizer_state",
        "optimizer_state",
        "rank",
        "read_job",
        "seed_for",
        "shard",
        "shards",
        "step_ended",
        "sum_over_ranks",
        "world_size",
    ]
    for name in syncline.__all__:
        assert getattr(syncline, name) is not None
    assert dir(syncline) == syncline.__all__
    with pytest.raises(AttributeError, match="no attribute 'distrbute'"):
        _ = syncline.distrbute


def test_the_command_line_starts_without_torch():
    code = "import sys, syncline.cli.main; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize("name", [name for name, path in modules() if ">>>" in path.read_text()])
def test_examples_in_docstrings_run(name):
    failures, tried = doctest.testmod(importlib.import_module(name))
    assert tried
    assert not failures


def test_every_module_says_what_it_is():
    for name, path in modules():
        assert ast.get_docstring(ast.parse(path.read_text())), name
