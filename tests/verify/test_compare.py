"""How recordings of runs compare, and which reason is named, worked out on small ones."""

from __future__ import annotations

import dataclasses
import json

import pytest

from syncline.verify.compare import Recorded, Step, first_difference, is_like, read_run

FACTS = {
    "strategy": "Synchronous",
    "is_synchronous": True,
    "fixes_overlap": False,
    "shards": 2,
    "threads": 1,
}


def forward(shard, **others):
    return {"shard": shard, "shapes": [[8, 3]], "inputs": ["x"], "generator": "g", **others}


def step(number, ranks, value="v", start=None, lr=(0.1,), **others):
    digests = {"a.weight": f"{value}{number}", "a.bias": f"b{number}"}
    forwards = {shard: [forward(shard, **others)] for shard in range(2)}
    first = {"a.weight": "s", "a.bias": "t"} if number == 1 else {}
    return Step(number, {rank: digests for rank in range(ranks)}, start or first, forwards, lr)


def run(ranks, overlap=True, steps=3, facts=None, **others):
    made = tuple(step(number, ranks, **others) for number in range(1, steps + 1))
    return Recorded(ranks, overlap, (FACTS | {"ranks": ranks} | (facts or {}),), (made,))


def with_step(recorded, number, **changes):
    """The run with another step of that number."""
    (steps,) = recorded.models
    changed = step(number, recorded.ranks, **changes)
    return dataclasses.replace(recorded, models=((*steps[: number - 1], changed, *steps[number:]),))


def test_equal_runs_have_no_difference_and_one_digest_of_weights():
    runs = [run(1), run(1, overlap=False), run(2), run(2, overlap=False)]
    assert first_difference(runs) is None
    assert len({one.weights for one in runs}) == 1
    assert all(is_like(runs[0], one) for one in runs)


def test_the_first_step_and_all_parameters_that_differ_are_named():
    other = with_step(with_step(run(2), 3, value="u"), 2, value="w")
    found = first_difference([run(1), other])
    assert (found.step, found.names) == (2, ("a.weight",))
    assert (found.run, found.base) == ("2 ranks, overlapped", "1 rank, overlapped")
    assert not is_like(run(1), other)
    assert run(1).weights != other.weights


def test_ranks_of_one_run_that_differ_come_first():
    (steps,) = run(2).models
    digests = {0: steps[1].digests[0], 1: {"a.weight": "v2", "a.bias": "other"}}
    apart = dataclasses.replace(steps[1], digests=digests)
    found = first_difference([run(1), dataclasses.replace(run(2), models=((steps[0], apart),))])
    assert (found.step, found.names) == (2, ("a.bias",))
    assert found.run == "2 ranks, overlapped, rank 1"
    assert "outside of optimizer.step()" in found.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"facts": {"shards": 4}}, "the shards of a step were 2 there and 4 here"),
        ({"facts": {"threads": 2}}, "the threads of a rank were 1 there and 2 here"),
        ({"lr": (0.2,)}, "the learning rate was 0.1 there and 0.2 here"),
        ({"shapes": [[4, 3]]}, "shard 0 had inputs of shape [8, 3] there and [4, 3] here"),
        ({"inputs": ["y"]}, "shard 0 got other samples: loop over syncline.shards(loader)"),
        ({"generator": "h"}, "torch's generator was in another state before the forward of shard"),
        ({}, "inputs, seeds, threads and learning rates were equal: the loop does something"),
    ],
)
def test_the_reason_is_the_first_fact_that_differs(changes, reason):
    facts = changes.pop("facts", None)
    other = run(2, value="w", facts=facts, **changes)
    found = first_difference([run(1), other])
    assert found.step == 1
    assert found.reason.startswith(reason)


def test_samples_that_differ_on_the_same_number_of_ranks_are_not_seeded():
    runs = [run(1), run(1, overlap=False, value="w", inputs=["y"]), run(2)]
    assert "random numbers that are not seeded" in first_difference(runs).reason


def test_where_only_the_exchange_differs_the_reason_says_so():
    found = first_difference([run(2), run(2, overlap=False, value="w")])
    assert "only the exchange differed" in found.reason


def test_other_parameters_at_the_start_mean_a_missing_seed():
    found = first_difference([run(1), run(2, value="w", start={"a.weight": "o", "a.bias": "t"})])
    assert (found.step, found.names) == (0, ("a.weight",))
    assert "torch.manual_seed" in found.reason


def test_a_difference_at_full_speed_is_found_at_the_last_step():
    late = [step(6, 1), step(6, 2, value="w", inputs=["y"])]
    runs = [
        dataclasses.replace(one, models=((*one.models[0], last),))
        for one, last in zip([run(1), run(2)], late, strict=True)
    ]
    found = first_difference(runs)
    assert (found.step, found.names) == (6, ("a.weight",))
    assert "got other samples" in found.reason
    assert runs[0].num_steps == 6


def test_a_forward_pass_that_is_missing_counts_as_no_input():
    other = run(2, value="w")
    (steps,) = other.models
    fewer = dataclasses.replace(steps[0], forwards={0: steps[0].forwards[0]})
    found = first_difference([run(1), dataclasses.replace(other, models=((fewer,),))])
    assert found.reason.startswith("shard 1 had inputs of shape [8, 3] there and none here")


def test_a_loop_that_ends_earlier_is_different():
    found = first_difference([run(1), run(2, steps=2)])
    assert (found.step, found.names) == (3, ())
    assert found.reason.startswith("the loop took 3 steps there and 2 here")


def test_what_ranks_wrote_is_put_together_by_shard(tmp_path):
    for rank in range(2):
        lines = [FACTS | {"ranks": 2}]
        lines += [
            {
                "step": number,
                "start": {"w": "s"} if number == 1 else {},
                "digests": {"w": f"{number}"},
                "forwards": [forward(rank)],
                "lr": [0.1],
            }
            for number in (1, 2)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"rank-{rank}-model-0.jsonl").write_text(text + '{"cut sho')
    found = read_run(tmp_path, 2, overlap=True)
    assert found.num_steps == 2
    assert found.facts[0]["shards"] == 2
    (steps,) = found.models
    assert [sorted(one.forwards) for one in steps] == [[0, 1], [0, 1]]
    assert [one.digests for one in steps] == [{r: {"w": k} for r in range(2)} for k in "12"]
    assert [one.start for one in steps] == [{"w": "s"}, {}]
