"""What left-out domains taught: made apart, carried to other machines, and taken for what it is there."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vicinal.adapters.methods import adapt
from vicinal.benchmarks import workers
from vicinal.benchmarks.jobs import ChooseJob, TeachJob, TrainJob, _with_choice
from vicinal.benchmarks.place import CHOICE, MODEL, TAUGHT, Place
from vicinal.benchmarks.plan import Plan, plan
from vicinal.benchmarks.run import (
    run_plans,
)
from vicinal.benchmarks.spec import Row, load_spec
from vicinal.benchmarks.workers import Desk
from vicinal.checkpoint import Trained, read_tensors
from vicinal.cli.reproduce import notes_of
from vicinal.errors import CheckpointError, DataError
from vicinal.models.backbones import Preprocessing, build_classifier
from vicinal.training.loop import StoppedError
from vicinal.training.progress import StopRequest

TINY = Path(__file__).parent / "tiny.toml"


def heard(parts: list[tuple[Plan, Place]], **how: Any) -> tuple[list[Any], set[str]]:
    """Run plans; return what failed, and whatever was said but for figures."""
    said: set[str] = set()
    failures = run_plans(parts, ["cpu"], lambda who, what, *step: said.update((who, what)), **how)
    return failures, said


def small_files(place: Place) -> dict[str, bytes]:
    """Return what of a folder's models is small enough to carry."""
    root = place.out / "models"
    paths = [*root.glob(f"*/{TAUGHT}"), *root.glob(f"*/{CHOICE}"), *root.glob("*/step_sizes/*.json")]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def tried_in(place: Place) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place.out / "choices.jsonl").read_text().splitlines()]


def trained_in(place: Place) -> set[str]:
    """Return the folders with a model in them, or the way to one."""
    return {path.parent.name for path in (place.out / "models").rglob("*.safetensors") if path.name != TAUGHT}


def same_model(one: Path, other: Path, untimed: Callable[[Any], Any]) -> bool:
    (tensors, header), (again, same) = read_tensors(one / MODEL), read_tensors(other / MODEL)
    equal = tensors.keys() == again.keys() and all(torch.equal(again[name], tensors[name]) for name in again)
    return equal and untimed(header) == untimed(same)


def test_a_choice_that_trains_left_out_models_saves_them_when_asked_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SAY_EVERY", 0.0)
    (run, *_), place, said = plan(load_spec(TINY)).trainings, Place(tmp_path), list[Any]()
    stop = StopRequest()
    stop.asked = True
    job = ChooseJob(run, "soft", "batch", place)
    with pytest.raises(StoppedError, match="stopped at iteration 1 of 6"):
        job(Desk("cpu", stop, said.append))
    (state,) = place.left_out.glob("*/state-*")
    assert read_tensors(state)[1]["iteration"] == 1
    assert any("left-out model" in stage for _, (stage, *_) in said)
    assert all(kind.saves_itself for kind in (TeachJob, TrainJob, ChooseJob))


def test_a_training_clears_away_what_is_its_own(tmp_path: Path) -> None:
    (run, *_), place = plan(load_spec(TINY)).trainings, Place(tmp_path)
    folder = place.model(run.key)
    (folder / "step_sizes").mkdir(parents=True)
    kept = {folder / MODEL, folder / "step_sizes" / ".soft.json.x.part"}  # which somebody may be writing
    for path in (*kept, folder / "state-erm.safetensors", folder / ".model.safetensors.x.part"):
        path.touch()
    TrainJob(run, place)(Desk("cpu", StopRequest(), lambda message: None))
    assert {path for path in folder.rglob("*") if path.is_file()} == kept


@pytest.mark.slow
def test_a_benchmark_goes_on_elsewhere_with_what_was_taught_alone(
    tmp_path: Path, lines: Callable[[Path], Any], untimed: Callable[[Any], Any]
) -> None:
    """One test, since it takes several runs: a whole one; one that teaches; one that gets the small files."""
    tiny = load_spec(TINY)
    rows = (Row("ERM", "erm"), Row("Soft", "soft"), Row("VNL", "vnl"), Row("Hard", "hard"))
    spec = replace(
        tiny, rows=rows, settings=tiny.settings[:1], figures=(), expects=(), one_choice=True, seeds=2
    )
    every, fewer = plan(spec), plan(replace(spec, rows=rows[:3]))
    whole, teaching, carried = (Place(tmp_path / name) for name in ("whole", "teaching", "carried"))
    first, second = (run.key for run in every.trainings)
    assert heard([(every, whole)])[0] == []

    # Teaching trains left-out models alone, and leaves what a whole run leaves.
    failures, said = heard([(fewer, teaching)], teach=True)
    assert failures == []
    assert {"rules", "step sizes"} <= said
    assert not {"trainings", "measurements"} & said
    assert all(name.startswith("on-") for name in trained_in(teaching))
    small = small_files(teaching)
    assert small.keys() == {f"{first}/{name}" for name in (TAUGHT, CHOICE, "step_sizes/soft.json")}
    assert {name: small_files(whole)[name] for name in small} == small
    assert not (teaching.out / "records.jsonl").exists()
    again: list[object] = []
    assert run_plans([(fewer, teaching)], ["cpu"], lambda *step: again.append(step), teach=True) == []
    assert again == []

    # A file that came through only in part is one line, and keeps nothing else from being done.
    for name, content in small.items():
        (carried.out / "models" / name).parent.mkdir(parents=True, exist_ok=True)
        (carried.out / "models" / name).write_bytes(content)
    taught = carried.model(first) / TAUGHT
    taught.write_bytes(taught.read_bytes()[:-100])
    failures, _ = heard([(fewer, carried)])
    (note,) = notes_of([], failures)
    assert f"(5 measurements): {taught}: damaged" in note
    assert "\n" not in note
    assert trained_in(carried) == {second}
    taught.write_bytes(small[f"{first}/{TAUGHT}"])

    # To measure seed 1 nobody needs the model of seed 0.
    alone = replace(fewer, measures=tuple(run for run in fewer.measures if run.seed == 1))
    failures, said = heard([(alone, carried)])
    assert failures == []
    assert not {"rules", "step sizes", "trainings"} & said
    assert trained_in(carried) == {second}

    # The rest: the source model of seed 0, and no left-out one.
    failures, said = heard([(fewer, carried)])
    assert failures == []
    assert not {"rules", "step sizes"} & said
    assert trained_in(carried) == {first, second}
    assert small_files(carried) == small
    assert all(same_model(carried.model(key), whole.model(key), untimed) for key in (first, second))
    mine = {run.key for run in fewer.measures}
    expected = [one for one in lines(whole.out) if one["protocol"]["benchmark"]["key"] in mine]
    assert lines(carried.out) == expected
    assert len(expected) == 2 * 2 * 3

    # A model of an earlier version has it inside: it is taken from there.
    taught.unlink()
    TeachJob(every.trainings[0], carried)(Desk("cpu", StopRequest(), lambda message: None))
    assert taught.read_bytes() == small[f"{first}/{TAUGHT}"]
    assert trained_in(carried) == {first, second}

    # What was tried is in what was taught, should its own file be gone.
    choice = carried.model(first) / CHOICE
    choice.unlink()
    assert not TeachJob(every.trainings[0], carried).done
    TeachJob(every.trainings[0], carried)(Desk("cpu", StopRequest(), lambda message: None))
    assert json.loads(choice.read_text()) == json.loads(small[f"{first}/{CHOICE}"])
    assert trained_in(carried) == {first, second}

    # What was taught for another model is none of this one's.
    taught.write_bytes(small[f"{first}/{TAUGHT}"].replace(first.encode(), second.encode()))
    (job,) = [TrainJob(run, carried) for run in every.trainings if run.key == first]
    with pytest.raises(CheckpointError, match="for another model"):
        job._train(carried.model(first), Desk("cpu", StopRequest(), lambda message: None))
    taught.write_bytes(small[f"{first}/{TAUGHT}"])

    # A new row needs a step size: left-out models are trained for it, and nothing else is made anew.
    failures, said = heard([(every, carried)])
    assert failures == []
    assert "step sizes" in said
    assert not {"rules", "trainings"} & said
    assert any(name.startswith("on-") for name in trained_in(carried))
    assert lines(carried.out) == lines(whole.out)
    assert tried_in(carried) == tried_in(whole)


def test_a_damaged_file_is_said_before_anything_is_done(tmp_path: Path) -> None:
    every, place = plan(load_spec(TINY)), Place(tmp_path)
    (run, *_) = [run for run in every.trainings if run.request.out_of_fold is not None]
    (place.model(run.key) / "step_sizes").mkdir(parents=True)
    for name, content in (("choice.json", '{"tried": ['), ("step_sizes/soft.json", "[]")):
        path = place.model(run.key) / name
        path.write_text(content)
        with pytest.raises(DataError, match=f"{name}: damaged .*; remove it") as caught:
            run_plans([(every, place)], ["cpu"], lambda *step: pytest.fail("began"))
        assert "\n" not in str(caught.value)
        path.unlink()
    assert not (tmp_path / "records.jsonl").exists()


def test_a_temperature_goes_with_the_options_it_was_chosen_under(tmp_path: Path) -> None:
    (run, *_) = plan(load_spec(TINY)).trainings
    preprocessing = Preprocessing(8, 1, (0.5,), (0.25,))
    model = build_classifier("small", 3, preprocessing=preprocessing).eval()
    trained = Trained(model, "small", ("a", "b", "c"), preprocessing, "erm")
    job = ChooseJob(run, "tent", "batch", Place(tmp_path), {"predict": "before"})
    job.path.parent.mkdir(parents=True)
    job.path.write_text(json.dumps({"batch": [{"lr": 1e-3, "temperature": 1.7, "chosen": True}]}))
    chosen = _with_choice(trained, job)
    assert adapt(chosen, "tent", predict="before").settings.output_temperature == 1.7
    assert adapt(chosen, "tent", predict="own").settings.output_temperature == 1.0
