"""Loops made up at random: each is refused with a reason, or has the bits of plain PyTorch.

On one rank with one shard a script is compared with the same script in plain PyTorch; with two
shards the body of a loop is compared on one rank, on two, and with plain PyTorch on the whole
batch. `pytest --hypothesis-profile long --timeout 4000 -n 0` on this file runs for an hour.
"""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from random_scripts import DEEDS, USUAL, Script

import syncline
from ranks import RankError, run_ranks
from syncline.errors import UsageError
from syncline.session import close_session

IS_LONG = settings.get_current_profile_name() == "long"
MORE = 300 if IS_LONG else 1

scripts = st.lists(
    st.one_of(st.sampled_from(DEEDS).map(lambda deed: [deed]), st.sampled_from(USUAL)),
    min_size=2,
    max_size=10,
).map(lambda parts: [deed for part in parts for deed in part])


@pytest.mark.usefixtures("alone")
@settings(max_examples=70 * MORE, derandomize=not IS_LONG)
@given(scripts, st.booleans(), st.booleans())
@example(["backward", "zeros", "backward", "step", "each to none", "step"], False, False)
@example(["clip", "backward", "zero", "backward", "step"], False, False)
@example(["backward", "clip", "backward critic", "step"], False, False)
@example(["backward", "clip", "each to none", "step"], False, False)
@example(["backward", "clip", "zeros", "step"], False, False)
@example(
    ["backward", "step", "zeros", "each to none", "backward without aside", "step"], True, True
)
def test_a_script_is_refused_or_has_the_bits_of_plain_pytorch(deeds, overlap, private):
    try:
        expected = Script(is_ours=False).run(deeds)
    except RuntimeError:
        event("plain PyTorch fails")  # such as AdamW after a cast
        return
    close_session()
    syncline.init()
    try:
        found = Script(is_ours=True, overlap=overlap, private_parameters=private).run(deeds)
    except UsageError as refusal:
        event(str(refusal)[:40])
        return
    event("accepted")
    assert found == expected


ONCE = ["load", "load part", "save", "restore", "add group", "cast", "cast back", "set gradients"]
"""Deeds that are no part of a loop's body: what they do depends on how often they are done."""
bodies = st.lists(st.sampled_from([deed for deed in DEEDS if deed not in ONCE]), max_size=3)
starts = st.lists(st.sampled_from(["load", "cast", "freeze", "shrink", "new memory"]), max_size=2)
NUM_STEPS = 3
NUM_SHARDS = 2


def seed_of(step, shard, number):
    return 1000 * step + 100 * shard + number


def run_body(start, body, **options):
    """Run a body for each batch of a flat loop."""
    syncline.init()
    script = Script(is_ours=True, shards=NUM_SHARDS, **options)
    for number, deed in enumerate(start):
        script.do(deed, number)
    for step in range(NUM_STEPS):
        for shard in script.replicas[0].my_shards:
            for replica in script.replicas:
                replica.begin_shard(shard, is_flat=True)
            for number, deed in enumerate(body):
                script.do(deed, seed_of(step, shard, number))
    values = {name: value.double().reshape(-1).tolist() for name, value in script.values().items()}
    return script.digest(), json.dumps(values)


def run_plain(start, body):
    """Run a body once a step, each backward on all shards."""
    script = Script(is_ours=False, has_statistics=False, dtype=torch.float64)
    for number, deed in enumerate(start):
        script.do(deed, number)
    for step in range(NUM_STEPS):
        for number, deed in enumerate(body):
            is_of_shard = deed.startswith("backward")
            for shard in range(NUM_SHARDS if is_of_shard else 1):
                script.do(deed, seed_of(step, shard, number), 1 / NUM_SHARDS if is_of_shard else 1)
    return script.values()


def around(before, after, usual):
    """Put random deeds before and after the backward of a usual loop."""
    first = next(number for number, deed in enumerate(usual) if deed.startswith("backward"))
    return [*before, *usual[: first + 1], *after, *usual[first + 1 :]]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:Detected call of")
@settings(max_examples=16 * MORE, derandomize=not IS_LONG)
@given(starts, bodies, bodies, st.sampled_from(USUAL), st.booleans(), st.booleans(), st.booleans())
def test_the_body_of_a_loop_is_refused_or_has_the_same_bits_on_one_rank_and_two(
    start, before, after, usual, overlap, private, has_statistics
):
    body = around(before, after, usual)
    options = {"overlap": overlap, "private_parameters": private}
    options |= {"has_statistics": has_statistics}
    options |= {"dtype": torch.float32 if has_statistics else torch.float64}
    found = []
    for size in (1, NUM_SHARDS):
        try:
            found += run_ranks(size, lambda: run_body(start, body, **options))
        except RankError as refusal:
            if "UsageError" not in str(refusal):
                raise
            event("refused")
            return
    event("accepted")
    assert len({digest for digest, _ in found}) == 1
    if not has_statistics:
        values = json.loads(found[0][1])
        expected = run_plain(start, body)
        assert set(values) == set(expected)
        for name, value in expected.items():
            ours = torch.tensor(values[name], dtype=torch.float64)
            torch.testing.assert_close(ours, value.reshape(-1).double(), rtol=1e-12, atol=1e-12)
