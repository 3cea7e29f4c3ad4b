"""`syncline run` and `syncline key`."""

from __future__ import annotations

import json
import socket

import pytest

pytestmark = pytest.mark.processes


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"

    def write(code: str) -> str:
        path.write_text(code)
        return "script.py"

    return write


def test_a_script_runs_on_every_rank_with_its_arguments_and_threads(cli, script):
    name = script(
        "import json, os, sys\n"
        "line = [os.environ['RANK'], os.environ['OMP_NUM_THREADS'], *sys.argv[1:]]\n"
        "os.write(1, (json.dumps(line) + '\\n').encode())\n"
    )
    status, out, err = cli(
        "run", "--ranks", "2", "--threads", "3", name, "a", "--ranks", "9", "-h", "--debug"
    )
    assert (status, err) == (0, "")
    rest = ["3", "a", "--ranks", "9", "-h", "--debug"]
    assert sorted(map(json.loads, out.splitlines())) == [["0", *rest], ["1", *rest]]


def test_a_module_runs_as_python_m_runs_it(cli):
    package = cli.folder / "mine" / "inner"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "loop.py").write_text(
        "import json, os, sys\n"
        "line = [os.environ['RANK'], __name__, __package__, *sys.argv[1:]]\n"
        "os.write(1, (json.dumps(line) + '\\n').encode())\n"
    )
    status, out, err = cli(
        "run", "--ranks", "2", "-m", "mine.inner.loop", "a", "-m", "--ranks", "9"
    )
    assert (status, err) == (0, "")
    rest = ["__main__", "mine.inner", "a", "-m", "--ranks", "9"]
    assert sorted(map(json.loads, out.splitlines())) == [["0", *rest], ["1", *rest]]


def test_in_an_sbatch_script_ranks_are_started(cli, script):
    name = script("import os; os.write(1, (os.environ['RANK'] + '\\n').encode())")
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    slurm |= {"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_LOCALID": "0"}
    status, out, err = cli("run", "--ranks", "2", name, **slurm)
    assert (status, err) == (0, "")
    assert sorted(out.split()) == ["0", "1"]


def test_the_status_of_a_script_that_fails_is_passed_on(cli, script):
    name = script("import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)")
    status, _, err = cli("run", "--ranks", "2", name)
    assert (status, err) == (1, "syncline: rank 1 ended with status 3\n")


@pytest.mark.parametrize(("arguments", "expected"), [((), 1), (("--go-on",), 0)])
def test_with_go_on_one_rank_that_ends_well_is_enough(cli, script, arguments, expected):
    name = script("import os, sys\nsys.exit(int(os.environ['RANK']))")
    status, _, err = cli("run", "--ranks", "2", *arguments, name)
    assert status == expected
    assert "rank 1 ended with status 1" in err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--ranks", "2", "no.py"], "no.py: there is no such file, but ranks run a Python file."),
        (["--ranks", "2", "."], ".: this is a folder, but ranks run a Python file."),
        (["--ranks", "0", "job.toml"], "--ranks: got 0, but a world has at least one rank."),
        (["--ranks", "1", "--threads", "0", "x"], "--threads: got 0, but a rank has at least one."),
        (["--ranks", "1", "--port", "70000", __file__], "port: got 70000, but a port lies"),
        (["--ranks", "1", "-m", "nosuch.module"], "nosuch.module: there is no such module, but"),
        (["--ranks", "1", "-m", "job.toml"], "job.toml: this is a file, but with -m ranks run a"),
        (["--ranks", "1", "-m", "../up"], "../up: there is no such module, but with -m ranks"),
        (["x.py"], "Missing option '--ranks'"),
        (["--ranks", "2"], "Missing argument"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(cli, arguments, line):
    status, out, err = cli("run", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"syncline: {line}")
    assert err.count("\n") == 1


def test_a_port_in_use_is_refused(cli, script):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        status, _, err = cli("run", "--ranks", "1", "--port", port, script(""))
    assert status == 2
    assert err.startswith(f"syncline: port: got {port} (address already in use), but rank 0")


def test_a_rank_does_not_start_ranks(cli, script):
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    status, _, err = cli("run", "--ranks", "2", script(""), **place)
    assert status == 2
    assert err == (
        "syncline: syncline run: started as rank 1 of 2 by torchrun, but it starts ranks itself."
        " Let torchrun start the script directly.\n"
    )


def test_a_key_is_fresh_and_long_enough(cli):
    first, second = (cli("key") for _ in range(2))
    assert first[0] == 0
    assert len(bytes.fromhex(first[1].strip())) == 32
    assert first[1] != second[1]
