"""A resumed run is the uninterrupted one, or is refused."""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vicinal.checkpoint import Trained, load, read_tensors, save, write_tensors
from vicinal.data import feeding
from vicinal.data.augment import Augment
from vicinal.data.domains import SourceDomain
from vicinal.data.episodes import Episodes
from vicinal.errors import CheckpointError, ConfigError, TrainingError, VicinalError
from vicinal.training.config import TrainConfig, as_dict
from vicinal.training.state import same_config
from vicinal.training.train import ModelSpec, Run, train_model

MakeSources = Callable[..., list[SourceDomain]]
MakeRun = Callable[..., Run]
TensorsOf = Callable[[Trained], dict[str, Tensor]]
SameTensors = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], bool]
CONFIG = TrainConfig(
    algorithm="erm",
    iterations=25,
    batch_size=6,
    group_size=5,
    num_samples=2,
    validate_every=8,
    save_every=1000,
)


STOPS = [
    ("erm", ("erm", 10), 0.0),
    ("neighbor", ("erm", 16), 0.0),
    ("neighbor", ("phi", 10), 0.0),
    ("meta", ("meta", 10), 0.0),
    ("erm", ("erm", 16), 1.0),
    ("neighbor", ("phi", 10), 1.0),
    ("meta", ("meta", 20), 1.0),
]


def untimed(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name not in ("seconds", "training_seconds")}


@pytest.mark.parametrize(("algorithm", "halt", "average"), STOPS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    algorithm: str,
    halt: tuple[str, int],
    average: float,
    spec: ModelSpec,
    make_sources: MakeSources,
    make_run: MakeRun,
    tensors_of: TensorsOf,
    same_tensors: SameTensors,
    tmp_path: Path,
) -> None:
    sources = make_sources()
    config = replace(CONFIG, algorithm=algorithm, average=average, augment=Augment())
    one, other = tmp_path / "whole", tmp_path / "resumed"
    whole = train_model(spec, sources, config, make_run(one), {})
    with pytest.raises(TrainingError, match=rf"stopped at iteration {halt[1]} of 25.*--resume"):
        train_model(spec, sources, config, make_run(other, halt=halt), {})
    torch.manual_seed(12345)  # what a new process brings along must not matter
    resumed = train_model(spec, sources, config, make_run(other, resume=True), {})
    assert same_tensors(tensors_of(resumed), tensors_of(whole))
    assert untimed(resumed.provenance) == untimed(whole.provenance)
    # The best weights may be older than the stop; the last ones, the optimizer and the generators are not.
    states = sorted(path.name for path in one.glob("state-*"))
    assert states == sorted(path.name for path in other.glob("state-*"))
    for name in states:
        (tensors, header), (again, same) = read_tensors(one / name), read_tensors(other / name)
        assert same_tensors(again, tensors)
        assert untimed(same) == untimed(header)


def test_a_state_of_another_kind_of_device_is_refused(
    spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match="stopped at iteration 10"):
        train_model(spec, make_sources(), CONFIG, make_run(tmp_path, halt=("erm", 10)), {})
    path = tmp_path / "state-erm.safetensors"
    tensors, header = read_tensors(path)
    tensors["noise"] = tensors["noise"][:16].clone()  # as long as the state of a GPU's generator
    write_tensors(path, tensors, header)
    with pytest.raises(CheckpointError, match="was made on another kind of device than cpu"):
        train_model(spec, make_sources(), CONFIG, make_run(tmp_path, resume=True), {})


def test_a_run_may_stop_again_and_again(
    spec: ModelSpec,
    make_sources: MakeSources,
    make_run: MakeRun,
    tensors_of: TensorsOf,
    same_tensors: SameTensors,
    tmp_path: Path,
) -> None:
    sources, config = make_sources(), replace(CONFIG, algorithm="meta", second_order=True)
    whole = train_model(spec, sources, config, make_run(), {})
    for halt in (8, 16, 24):
        with pytest.raises(TrainingError, match=f"stopped at iteration {halt} "):
            train_model(spec, sources, config, make_run(tmp_path, resume=True, halt=("meta", halt)), {})
    resumed = train_model(spec, sources, config, make_run(tmp_path, resume=True), {})
    assert same_tensors(tensors_of(resumed), tensors_of(whole))


@pytest.fixture
def feed_ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Return a function that has so many workers make episodes ahead, and gives the batches drawn so far."""

    def feed(workers: int) -> list[int]:
        drawn: list[int] = []
        choose = Episodes._choose

        def counted(self: Episodes, *args: Any) -> Any:
            drawn.append(len(drawn) + 1)
            return choose(self, *args)

        monkeypatch.setattr(feeding, "LARGE_BYTES", 0 if workers else 1 << 40)
        monkeypatch.setattr(feeding, "WORKERS", workers)
        monkeypatch.setattr(Episodes, "_choose", counted)
        return drawn

    return feed


OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _others() -> None:
    """Note the threads that were there before: a compiler of torch's keeps some of its own."""
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def pool_threads() -> list[threading.Thread]:
    """Return the workers that a test has started and that are still there."""
    started = [thread for thread in threading.enumerate() if thread not in OTHERS]
    return [thread for thread in started if thread.name.startswith("ThreadPoolExecutor")]


@pytest.mark.parametrize("algorithm", ["neighbor", "meta"])
def test_the_number_of_workers_has_no_part_in_the_result(
    algorithm: str,
    spec: ModelSpec,
    make_sources: MakeSources,
    make_run: MakeRun,
    tensors_of: TensorsOf,
    same_tensors: SameTensors,
    feed_ahead: Callable[[int], list[int]],
) -> None:
    sources, config = make_sources(), replace(CONFIG, algorithm=algorithm, augment=Augment(brightness=0.2))
    results = []
    for workers in (0, 1, 3):
        feed_ahead(workers)
        results.append(tensors_of(train_model(spec, sources, config, make_run(), {})))
        assert pool_threads() == []
    assert same_tensors(results[1], results[0])
    assert same_tensors(results[2], results[0])


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 0), (0, 3)])
@pytest.mark.parametrize(("algorithm", "batches"), [("erm", 1), ("meta", 2)])
def test_a_run_stopped_while_episodes_were_drawn_ahead_is_resumed_bit_for_bit(
    algorithm: str,
    batches: int,
    before: int,
    after: int,
    spec: ModelSpec,
    make_sources: MakeSources,
    make_run: MakeRun,
    same_tensors: SameTensors,
    feed_ahead: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    sources, config = make_sources(), replace(CONFIG, algorithm=algorithm, augment=Augment())
    one, other = tmp_path / "whole", tmp_path / "resumed"
    feed_ahead(0)
    train_model(spec, sources, config, make_run(one), {})
    drawn = feed_ahead(before)
    with pytest.raises(TrainingError, match="stopped at iteration 10 of 25"):
        train_model(spec, sources, config, make_run(other, halt=(algorithm, 10)), {})
    assert (len(drawn) > 10 * batches) == (before > 0)  # more was drawn than was learned from
    assert pool_threads() == []
    feed_ahead(after)
    train_model(spec, sources, config, make_run(other, resume=True), {})
    name = f"state-{algorithm}.safetensors"
    (tensors, header), (again, same) = read_tensors(one / name), read_tensors(other / name)
    assert same_tensors(again, tensors)
    assert untimed(same) == untimed(header)


@pytest.fixture
def stopped(spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun, tmp_path: Path) -> Path:
    """Return the folder of a run that was stopped after ten iterations."""
    with pytest.raises(TrainingError, match="stopped"):
        train_model(spec, make_sources(), CONFIG, make_run(tmp_path, halt=("erm", 10)), {})
    return tmp_path


def test_time_before_an_interruption_counts(
    stopped: Path, spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun
) -> None:
    path = stopped / "state-erm.safetensors"
    tensors, header = read_tensors(path)
    assert 0 < header["seconds"] < 100
    write_tensors(path, tensors, {**header, "seconds": 1000.0})
    trained = train_model(spec, make_sources(), CONFIG, make_run(stopped, resume=True), {})
    assert 1000 < trained.provenance["training_seconds"] < 1100


@pytest.mark.parametrize(
    "change", [{"head_lr": 1.0}, {"seed": 1}, {"iterations": 30}, {"augment": Augment()}]
)
def test_a_resume_with_other_settings_is_refused_in_one_line(
    change: dict[str, Any], spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun, stopped: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(change))} was .* and is now") as caught:
        train_model(spec, make_sources(), replace(CONFIG, **change), make_run(stopped, resume=True), {})
    assert "\n" not in str(caught.value)


def test_how_often_a_run_saves_may_change(
    spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun, stopped: Path
) -> None:
    config = replace(CONFIG, save_every=4)
    assert train_model(spec, make_sources(), config, make_run(stopped, resume=True), {})


def test_a_resume_with_another_backbone_is_refused_in_one_line(
    spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun, stopped: Path
) -> None:
    with pytest.raises(VicinalError, match="resume"):
        train_model(
            replace(spec, backbone="small_gn"), make_sources(), CONFIG, make_run(stopped, resume=True), {}
        )


@pytest.mark.parametrize("change", [{"size": 16}, {"std": (0.1,)}, {"fit": "squash"}])
def test_a_resume_with_other_images_is_refused_in_one_line(
    change: dict[str, Any], spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun, stopped: Path
) -> None:
    other = replace(spec, preprocessing=replace(spec.preprocessing, **change))
    with pytest.raises(ConfigError, match=f"{next(iter(change))} was .* and is now"):
        train_model(other, make_sources(), CONFIG, make_run(stopped, resume=True), {})


def test_a_resume_with_other_data_options_is_refused_in_one_line(
    spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun, stopped: Path
) -> None:
    moved = {"data_options": {"test": 5}, "dataset": "elsewhere"}
    with pytest.raises(ConfigError, match=r"data_options was None and is now \{'test': 5\}"):
        train_model(spec, make_sources(), CONFIG, make_run(stopped, resume=True), moved)


def test_what_was_started_with_a_tuple_goes_on(
    spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun, tmp_path: Path
) -> None:
    facts = {"data_options": {"angles": (0, 45)}}
    with pytest.raises(TrainingError, match="stopped"):
        train_model(spec, make_sources(), CONFIG, make_run(tmp_path, halt=("erm", 10)), facts)
    assert train_model(spec, make_sources(), CONFIG, make_run(tmp_path, resume=True), facts)


def test_a_run_from_before_more_was_asked_about_goes_on(
    stopped: Path, spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun
) -> None:
    path = stopped / "state-erm.safetensors"
    tensors, header = read_tensors(path)
    for name in ("size", "std", "fit", "data_seed", "data_options"):
        del header["config"][name]
    write_tensors(path, tensors, header)
    assert train_model(spec, make_sources(), CONFIG, make_run(stopped, resume=True), {"data_seed": 4})


def test_a_resume_with_other_sources_is_refused(
    spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun, stopped: Path
) -> None:
    others = [replace(source, name=f"new {source.name}") for source in make_sources(seed=9)]
    with pytest.raises(VicinalError, match="d0"):
        train_model(spec, others, CONFIG, make_run(stopped, resume=True), {})


def test_a_file_that_is_no_state_of_this_stage_is_refused(
    spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun, stopped: Path
) -> None:
    trained = train_model(spec, make_sources(), CONFIG, make_run(), {})
    save(stopped / "state-erm.safetensors", trained)
    with pytest.raises(CheckpointError, match="not a training state of stage 'erm'"):
        train_model(spec, make_sources(), CONFIG, make_run(stopped, resume=True), {})


def test_a_state_is_not_taken_for_a_model(stopped: Path) -> None:
    with pytest.raises(CheckpointError, match="unfinished training"):
        load(stopped / "state-erm.safetensors")


def test_a_run_without_resume_starts_over(
    spec: ModelSpec,
    make_sources: MakeSources,
    make_run: MakeRun,
    tensors_of: TensorsOf,
    same_tensors: SameTensors,
    stopped: Path,
) -> None:
    whole = train_model(spec, make_sources(), CONFIG, make_run(), {})
    again = train_model(spec, make_sources(), CONFIG, make_run(stopped), {})
    assert same_tensors(tensors_of(again), tensors_of(whole))


def test_a_resumed_run_goes_on_with_the_same_scalars(
    spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun, stopped: Path
) -> None:
    train_model(spec, make_sources(), CONFIG, make_run(stopped, resume=True), {})
    lines = (stopped / "scalars.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [8, 10, 16, 20, 24, 25]


def test_a_run_from_before_an_option_existed_did_what_is_now_its_default() -> None:
    now = as_dict(CONFIG)
    before = {name: value for name, value in now.items() if name != "phi_layers"}
    same_config(Path("run"), before, now)
    with pytest.raises(ConfigError, match="phi_layers was 3 and is now 2"):
        same_config(Path("run"), before, {**now, "phi_layers": 2})
