from pathlib import Path

import pytest

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.contract import METHODS
from vicinal.benchmarks.peers import (
    TRAINED_FOR,
    PeersConfig,
    methods_on,
    planned,
    run_peers,
    wanted_algorithms,
)
from vicinal.evaluation.record import read_records


def config(out: Path, **options: object) -> PeersConfig:
    return PeersConfig("digits", out, **options)  # type: ignore[arg-type]


def test_every_method_is_measured_once_on_its_own_source_model(tmp_path: Path) -> None:
    everywhere = [(job.algorithm, job.method) for job in planned(config(tmp_path), set())]
    assert {method for _, method in everywhere} == set(METHODS)
    for algorithm, methods in TRAINED_FOR.items():
        for method in methods:
            if method in METHODS:
                assert {a for a, m in everywhere if m == method} == {algorithm}


def test_only_the_trainings_that_are_needed(tmp_path: Path) -> None:
    assert wanted_algorithms(config(tmp_path, methods=("erm", "soft"))) == ["neighbor"]
    assert wanted_algorithms(config(tmp_path, methods=("erm", "vnl_paper"))) == ["neighbor", "meta"]
    assert methods_on("meta", ("erm", "soft", "hard", "vnl_paper", "vnl")) == [
        "erm",
        "soft",
        "vnl_paper",
        "vnl",
    ]


def test_both_statistics_are_planned_and_what_is_done_is_not(tmp_path: Path) -> None:
    wanted = config(tmp_path, methods=("erm", "soft"), seeds=(0, 1))
    jobs = planned(wanted, set())
    assert [(j.method, j.seed, [e.options["statistics"] for e in j.entries]) for j in jobs] == [
        ("erm", 0, ["source"]),
        ("erm", 1, ["source"]),
        ("soft", 0, ["batch", "stream"]),
        ("soft", 1, ["batch", "stream"]),
    ]
    done = {("neighbor", 0, "erm", "source"), ("neighbor", 1, "soft", "stream")}
    assert [(j.method, j.seed, len(j.entries)) for j in planned(wanted, done)] == [
        ("erm", 1, 1),
        ("soft", 0, 2),
        ("soft", 1, 1),
    ]


@pytest.mark.slow
def test_a_small_comparison_runs_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    small = config(
        tmp_path,
        methods=("erm", "soft"),
        seeds=(0,),
        workers=1,
        training={"iterations": 4},
        out_of_fold={"stream_images": 40, "epochs": 2, "step_sizes": (1e-3,)},
    )
    steps: list[tuple[str, int, int]] = []
    first = run_peers(small, lambda *step: steps.append(step))
    assert [(r.method, r.statistics) for r in first].count(("soft", "stream")) == 2  # two targets
    assert steps[0] == ("train", 1, 1)
    chosen = first[-1].protocol["adapter"]["lr"]
    assert chosen in [METHODS["soft"].defaults.lr * scale for scale in (0.1, 1, 10)]
    again = run_peers(small, lambda *step: None)
    assert len(again) == len(first) == len(read_records(tmp_path / "records.jsonl"))
