"""Runs of a benchmark: what is missing, what is shared, and that no kill loses or changes anything."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vicinal.adapters.methods import adapt
from vicinal.benchmarks.place import CHOICE, MODEL, Place, step_sizes_in, write_json
from vicinal.benchmarks.plan import Plan, plan
from vicinal.benchmarks.prepare import roles_for
from vicinal.benchmarks.run import (
    devices_for,
    missing_data,
    records_of,
    run_plan,
    run_plans,
    without_data,
    write_choices,
    write_index,
)
from vicinal.benchmarks.spec import Row, Setting, Spec, load_spec
from vicinal.benchmarks.store import Store
from vicinal.checkpoint import load, read_tensors
from vicinal.data.streams import StreamSpec, make_stream
from vicinal.errors import DataError
from vicinal.evaluation.example import Example, load_examples
from vicinal.evaluation.online import run_online

HERE = Path(__file__).parent
TINY = HERE / "tiny.toml"
ROWS = (Row("ERM", "erm"), Row("Soft", "soft"))
TRAINING = "iterations = 40, save_every = 3"


def test_data_that_are_not_there_are_named_with_a_remedy_and_left_out(tmp_path: Path) -> None:
    settings = (Setting("A", "digits"), Setting("B", "pacs"), Setting("C", "pacs", batch_size=3))
    whole = plan(Spec("made", "Made", seeds=2, settings=settings, rows=ROWS))
    (missing,) = missing_data(whole, tmp_path)
    assert missing.data == "pacs"
    assert "vicinal data get pacs" in missing.how
    assert str(tmp_path) in missing.how
    rest = without_data(whole, [missing])
    assert {run.setting for run in rest.measures} == {"A"}
    assert {run.request.data for run in rest.trainings} == {"digits"}
    assert without_data(whole, []) == whole


def test_own_data_that_are_elsewhere_are_missing_and_their_table_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = '[[settings]]\nname = "Own"\ndata = "./own"\ntargets = [["b"]]\nbackbone = "small"\n'
    Path("own.toml").write_text('title = "t"\nrows = [{ label = "ERM", method = "erm" }]\n' + text)
    whole = plan(load_spec("own.toml"))
    (missing,) = missing_data(whole, tmp_path)
    assert missing.data == "./own"
    assert str(tmp_path) in missing.how
    Path("own").mkdir()
    assert missing_data(whole, tmp_path) == []


def test_gpus_are_given_out_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert devices_for("cuda", 0) == ["cuda:0", "cuda:1", "cuda:2"]
    assert devices_for("cuda", 5) == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"]
    assert devices_for("cpu", 0) == ["cpu"] * 4
    assert devices_for("cpu", 2) == ["cpu"] * 2


def test_the_index_grows(tmp_path: Path) -> None:
    one = plan(Spec("made", "Made", seeds=1, settings=(Setting("A", "digits"),), rows=ROWS))
    other = plan(Spec("made", "Made", seeds=2, settings=(Setting("A", "pacs", (("photo",),)),), rows=ROWS))
    write_index(one, tmp_path / "out")
    write_index(other, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "models.json").read_text())
    assert index.keys() == {run.key for run in (*one.trainings, *other.trainings)}
    assert index[one.trainings[0].key] == {
        "algorithm": "erm",
        "seed": 0,
        "data": "digits",
        "targets": ["0", "90"],
        "backbone": "small",
    }


def test_an_index_that_several_write_has_the_models_of_all(tmp_path: Path) -> None:
    spec = Spec("made", "Made", seeds=12, settings=(Setting("A", "digits"),), rows=ROWS[:1])
    runs = plan(spec).trainings
    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(lambda run: write_index(Plan((run,), ()), tmp_path), runs))
    assert json.loads((tmp_path / "models.json").read_text()).keys() == {run.key for run in runs}


@pytest.mark.parametrize("content", ['{"a1": {', "[]"])
def test_an_index_that_is_none_is_said_in_one_line_and_kept(tmp_path: Path, content: str) -> None:
    (tmp_path / "models.json").write_text(content)
    with pytest.raises(DataError, match=r"models\.json: .*; remove it, and it will be made anew$"):
        write_index(Plan((), ()), tmp_path)
    assert (tmp_path / "models.json").read_text() == content


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_of_the_models_only_what_was_taught_is_for_version_control(tmp_path: Path) -> None:
    write_index(Plan((), ()), tmp_path)
    small = ["a1/taught.safetensors", "a1/choice.json", "a1/step_sizes/soft.json"]
    large = ["a1/model.safetensors", "a1/state-erm.safetensors", "left_out/on-15-b2/model.safetensors"]
    hidden = [
        ".a1.lock",
        "a1/.taught.safetensors.x.part",
        "a1/step_sizes/.soft.json.lock",
        "left_out/.on.lock",
    ]
    for name in (*small, *large, *hidden):
        path = tmp_path / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    listed = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert sorted(listed) == sorted([".gitignore", "models.json", *(f"models/{name}" for name in small)])


def test_choices_grow_beside_those_of_other_plans_also_where_nothing_is_left_to_do(tmp_path: Path) -> None:
    one = plan(Spec("made", "Made", seeds=2, settings=(Setting("A", "digits"),), rows=ROWS[:1]))
    place, row = Place(tmp_path), {"method": "vnl", "lr": 0.1, "nll": math.nan, "chosen": True}
    for run in one.trainings:
        place.model(run.key).mkdir(parents=True)
        (place.model(run.key) / MODEL).touch()
        write_json(place.model(run.key) / CHOICE, {"tried": [row]})
    other = {"model": "elsewhere", "method": "soft"}
    (tmp_path / "choices.jsonl").write_text(json.dumps(other) + "\n")
    write_choices(replace(one, trainings=one.trainings[:1]), place)
    write_choices(one, place)
    lines = [json.loads(line) for line in (tmp_path / "choices.jsonl").read_text().splitlines()]
    assert lines[0] == other
    assert {line["model"] for line in lines[1:]} == {run.key for run in one.trainings}
    assert all(line["nll"] is None for line in lines[1:])  # which strict readers take
    (tmp_path / "choices.jsonl").unlink()
    assert run_plan(Plan(one.trainings, ()), place, ["cpu"], lambda *step: None) == []
    assert len((tmp_path / "choices.jsonl").read_text().splitlines()) == 2


def test_a_file_of_an_earlier_version_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "soft.json").write_text('{"batch": {"lr": 0.1}}')
    with pytest.raises(DataError, match=r"soft\.json: made by an earlier version"):
        step_sizes_in(tmp_path / "soft.json")


def test_a_file_of_choices_that_is_cut_off_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "soft.json").write_text('{"batch": [{"lr": 0.1, ')
    with pytest.raises(DataError, match=r"soft\.json: damaged .*; remove it, and it will be made anew$"):
        step_sizes_in(tmp_path / "soft.json")


@pytest.mark.slow
def test_several_plans_share_the_workers_and_keep_to_their_places(tmp_path: Path) -> None:
    tiny = load_spec(TINY)
    rows = tuple(row for row in tiny.rows if row.method in ("erm", "bn"))
    plans = [plan(replace(tiny, rows=rows[:1])), plan(replace(tiny, rows=rows[1:2], seeds=2))]
    parts = [(one, Place(tmp_path / name)) for one, name in zip(plans, "ab", strict=True)]
    said: list[str] = []
    assert run_plans(parts, ["cpu"], lambda who, what, done, total: said.append(f"{who} {total}")) == []
    measured = sum(len(one.measures) for one in plans)
    assert f"measurements {measured}" in said
    for one, place in parts:
        found = Store(place.out).done()
        assert found == {(run.key, target) for run in one.measures for target in run.results}


@pytest.mark.slow
def test_models_of_other_seeds_run_with_the_phi_and_step_size_of_seed_0(tmp_path: Path) -> None:
    tiny = load_spec(TINY)
    rows = (Row("Soft", "soft"), Row("VNL", "vnl"))
    made = plan(
        replace(tiny, rows=rows, settings=tiny.settings[:1], figures=(), expects=(), one_choice=True), seeds=2
    )
    assert run_plans([(made, Place(tmp_path))], ["cpu"], lambda *said: None) == []
    records = {(r.method, r.seed): r for r in Store(tmp_path).records() if r.target == "0"}
    assert records.keys() == {(method, seed) for method in ("soft", "vnl") for seed in (0, 1)}
    for method in ("soft", "vnl"):
        own, borrowed = records[method, 0], records[method, 1]
        assert borrowed.protocol["adapter"]["lr"] == own.protocol["adapter"]["lr"]
        assert (
            borrowed.protocol["selection"] == own.protocol["selection"] + ", by the left-out models of seed 0"
        )
        assert borrowed.protocol["training"]["out_of_fold"] == own.protocol["training"]["out_of_fold"]
        assert borrowed.protocol["training"]["train"]["seed"] == 1
        assert borrowed.accuracy != own.accuracy
    first, second = (load(Place(tmp_path).model(run.key)) for run in made.trainings)
    assert first.anchor_phi is not None
    assert second.anchor_phi is None
    # The labels are those of the model of seed 1 under the phi of seed 0: made here by hand.
    lent = replace(second, anchor_phi=first.anchor_phi, predict_phi=first.predict_phi, choice=first.choice)
    roles = roles_for(second)
    stream, answers = (
        make_stream(StreamSpec("online", 20), [roles.targets[0].images], [roles.answers["0"]], 1),
        roles.answers["0"],
    )
    p = run_online(adapt(lent, "vnl", seed=1), stream).probabilities
    assert float((p.argmax(-1) == answers[stream.order]).float().mean()) == records["vnl", 1].accuracy


# --- Runs in processes, killed and not ----------------------------------------------------------------------


def killed_runs(folder: Path, **job: Any) -> dict[str, Any]:
    """Run a benchmark in `folder`/whole, then in `folder`/killed-* with kills; return how that went."""
    # Trained long enough that blows fall in the middle of a training too.
    (folder / "tiny.toml").write_text(TINY.read_text().replace("iterations = 6, save_every = 2", TRAINING))
    asked = {
        "spec": str(folder / "tiny.toml"),
        "only": [],
        "seeds": 1,
        "folders": str(folder),
        "seed": 0,
        "share": 0.2,
        **job,
    }
    ran = subprocess.run(
        [sys.executable, str(HERE / "kill_run.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=540,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    outcome: dict[str, Any] = json.loads(ran.stdout)
    return outcome


def no_kill_loses_doubles_or_changes_a_record(
    folder: Path, outcome: dict[str, Any], lines: Callable[[Path], Any], untimed: Callable[[Any], Any]
) -> None:
    assert outcome["kills"] == 20
    assert set(outcome["codes"]) == {0}
    # The blows fell while models were trained, and while they were measured.
    assert any(states and not models for states, models, _ in outcome["found"])
    assert any(models and 0 < records < 13 for _, models, records in outcome["found"])
    wanted = plan(load_spec(folder / "tiny.toml"), seeds=1)
    whole = lines(folder / "whole")
    results = sorted((run.key, target) for run in wanted.measures for target in run.results)
    assert [(one["protocol"]["benchmark"]["key"], one["target"]) for one in whole] == results
    folders = sorted(folder.glob("killed-*"))
    assert len(folders) == outcome["folders"]
    for other in folders:
        assert lines(other) == whole
        # One writer or two, killed or not: the models are the same, bit for bit.
        for path in sorted((folder / "whole" / "models").rglob("model.safetensors")):
            tensors, header = read_tensors(path)
            again, same = read_tensors(other / path.relative_to(folder / "whole"))
            assert untimed(same) == untimed(header)
            assert all(torch.equal(again[name], value) for name, value in tensors.items())
            assert again.keys() == tensors.keys()
        left = [
            path.name for path in other.rglob("*") if path.name.startswith("state-") or ".part" in path.name
        ]
        assert left == []


def a_benchmark_leaves_what_its_plan_says(folder: Path, outcome: dict[str, Any]) -> None:
    whole = plan(load_spec(folder / "tiny.toml"), seeds=1)
    records = records_of(whole, Store(folder / "whole"))
    (model,) = {run.key for run in whole.trainings}
    cells = {(r.protocol["benchmark"]["setting"], r.protocol["benchmark"]["row"], r.target) for r in records}
    assert cells == {(run.setting, run.row, target) for run in whole.measures for target in run.results}
    for record in records:
        about = record.protocol["benchmark"]
        assert (about["spec"], about["model"], about["quick"]) == ("tiny", model, False)
        assert record.protocol["training_seconds"] > 0
        assert record.protocol["provenance"]["sources"] == ["15", "45", "75"]
        assert record.algorithm == "erm"  # theta of `neighbor` is ERM's
    by_row = {(r.protocol["benchmark"]["row"], r.protocol["benchmark"]["setting"]): r for r in records}
    erm, phi = by_row["ERM baseline", "digits"], by_row["Neighbor", "digits"]
    assert phi.protocol["parameters"] > erm.protocol["parameters"] > 10_000
    given, chosen = by_row["Soft pseudo label, stream", "digits"], by_row["Soft pseudo label", "digits"]
    assert given.protocol["adapter"]["lr"] == 1e-3
    assert given.protocol["selection"].endswith("step size given")
    found = step_sizes_in(folder / "whole" / "models" / model / "step_sizes" / "soft.json")
    assert chosen.protocol["adapter"]["lr"] == found["batch"]["lr"]
    assert "left-out source domains" in chosen.protocol["selection"]
    assert found.keys() == {"batch"}  # the other kind has its step size given: nothing was chosen for it
    tried = [json.loads(line) for line in (folder / "whole" / "choices.jsonl").read_text().splitlines()]
    assert {(row["model"], row["method"]) for row in tried} == {(model, "vnl"), (model, "soft")}
    of_soft = [row for row in tried if row["method"] == "soft"]
    assert [row["lr"] for row in of_soft if row["chosen"]] == [found["batch"]["lr"]]
    assert len({row["lr"] for row in of_soft}) == 3
    joint = by_row["ERM baseline", "digits, mixed"]
    assert joint.target == "0+90"
    assert set(joint.protocol["accuracy_by_domain"]) == {"0", "90"}


def images_that_our_method_changed_are_kept(folder: Path, outcome: dict[str, Any]) -> None:
    whole = load_examples(folder / "whole")
    assert {(one.method, one.setting) for one in whole} == {("This paper", "digits")}
    assert {one.target for one in whole} == {"0", "90"}
    assert all(one.fixed != one.broken for one in whole)

    def plain(one: Example) -> tuple[object, ...]:
        return one.image.tolist(), one.truth, one.before, one.after, one.after_confidence, one.target

    for other in (folder / f"killed-{number}" for number in range(outcome["folders"])):
        assert sorted(map(plain, load_examples(other)), key=str) == sorted(map(plain, whole), key=str)


def records_stand_in_every_cell_that_shares_their_run(folder: Path, outcome: dict[str, Any]) -> None:
    tiny = load_spec(folder / "tiny.toml")
    store = Store(folder / "whole")
    renamed = replace(
        tiny,
        name="other",
        settings=(*tiny.settings, replace(tiny.settings[0], name="again", metric="ece")),
        rows=tuple(replace(row, settings=()) for row in tiny.rows if row.method in ("erm", "neighbor")),
    )
    found = records_of(plan(renamed, seeds=1), store)

    def accuracies(setting: str) -> list[float]:
        return [r.accuracy for r in found if r.protocol["benchmark"]["setting"] == setting]

    # Without vnl in the spec the left-out models differ, and so do the models: nothing is shared.
    assert found == []
    shared = replace(renamed, rows=tuple(replace(row, settings=()) for row in tiny.rows))
    found = records_of(plan(shared, seeds=1), store)
    assert accuracies("again") == accuracies("digits") != []
    assert {r.protocol["benchmark"]["spec"] for r in found} == {"other"}


@pytest.mark.slow
def test_twenty_kills_and_what_a_benchmark_leaves(
    tmp_path: Path, lines: Callable[[Path], Any], untimed: Callable[[Any], Any]
) -> None:
    """One test, since the runs that it looks at take most of a minute."""
    outcome = killed_runs(tmp_path, kills=20)
    no_kill_loses_doubles_or_changes_a_record(tmp_path, outcome, lines, untimed)
    for check in (
        a_benchmark_leaves_what_its_plan_says,
        images_that_our_method_changed_are_kept,
        records_stand_in_every_cell_that_shares_their_run,
    ):
        check(tmp_path, outcome)


def test_records_of_other_plans_are_left_out(tmp_path: Path) -> None:
    assert records_of(Plan((), ()), Store(tmp_path)) == []


# --- Interrupts ---------------------------------------------------------------------------------------------


def session_of(pid: int) -> list[int]:
    """Return the living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["terminated", "interrupted"])
def test_an_end_from_outside_takes_the_workers_along_and_is_one_line(tmp_path: Path, number: int) -> None:
    long = TINY.read_text().replace("iterations = 6", "iterations = 100000")
    # One worker is at a left-out model of seed 0, the other at the source model of seed 1.
    (tmp_path / "long.toml").write_text("one_choice = true\n" + long)
    words = ["reproduce", "long.toml", "--seeds", "2", "--workers", "2", "--device", "cpu", "--out", "out"]
    ran = subprocess.Popen(
        [sys.executable, "-c", "from vicinal.cli import main; main()", *words],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background jobs ignore Ctrl-C, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        until = time.monotonic() + 240
        while time.monotonic() < until and len(list(tmp_path.glob("out/models/**/state-*"))) < 2:
            assert ran.poll() is None, ran.communicate()
            time.sleep(0.05)
        assert len(session_of(ran.pid)) >= 3
        started = time.monotonic()
        if number == signal.SIGTERM:
            ran.terminate()  # the parent alone
        else:
            os.killpg(ran.pid, number)  # as a terminal does
        _, said = ran.communicate(timeout=60)
        assert time.monotonic() - started < 30
        assert ran.returncode == 130
        assert said.splitlines() == ["vicinal: interrupted: the same command goes on from here"]
        until = time.monotonic() + 20  # Python's own helper process needs a moment to see that it is alone
        while session_of(ran.pid) and time.monotonic() < until:
            time.sleep(0.05)
        assert session_of(ran.pid) == []
    finally:
        if ran.poll() is None:
            os.killpg(ran.pid, signal.SIGKILL)
    states = list(tmp_path.glob("out/models/**/state-*"))
    assert sorted(state.parent.parent.name for state in states) == ["left_out", "models"]
    for state in states:  # saved where it was, not where it had been saved last
        assert read_tensors(state)[1]["iteration"] > 0
