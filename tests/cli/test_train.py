import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vicinal import checkpoint
from vicinal.adapters.vnl_settings import VOTES
from vicinal.checkpoint import load
from vicinal.evaluation.record import read_records
from vicinal.report.bars import Bars

COMMAND = [sys.executable, "-c", "from vicinal.cli import main; main()"]
BASE = ("--backbone", "small", "--size", 16, "--device", "cpu", "--target", "light")
QUICK = (*BASE, "--batch-size", 4, "--iterations", 4)
BARE = (*QUICK, "--no-out-of-fold")


def test_train_evaluate_adapt_on_an_own_folder(vicinal: Any, domains: Path, tmp_path: Path) -> None:
    ran = vicinal("train", domains, *QUICK)
    assert ran.code == 0, ran.err
    run = tmp_path / "runs" / "shades-light"
    trained = load(run)
    assert trained.classes == ("left", "right")
    assert trained.provenance["sources"] == ["dark", "dim", "mid"]
    assert trained.choice["table"]
    assert "source validation accuracy" in ran.out
    ran = vicinal("evaluate", run, "--device", "cpu")
    assert ran.code == 0, ran.err
    assert [record.method for record in read_records(run / "records.jsonl")] == ["erm", "bn", "soft", "vnl"]
    ran = vicinal("adapt", run, domains / "light", "--device", "cpu")
    assert ran.code == 0, ran.err
    assert len((tmp_path / "adapted" / "predictions.csv").read_text().splitlines()) == 21


def test_without_left_out_models_vnl_runs_by_its_defaults(
    vicinal: Any, domains: Path, tmp_path: Path
) -> None:
    assert vicinal("train", domains, *BARE, "--algorithm", "erm", "--out", "run").code == 0
    ran = vicinal("evaluate", "run", "--device", "cpu")
    assert ran.code == 0, ran.err
    *_, vnl = read_records(tmp_path / "run" / "records.jsonl")
    assert (vnl.method, vnl.predict) == ("vnl", "own")
    assert vnl.protocol["selection"] == "model on source validation images; nothing else"
    assert vicinal("adapt", "run", domains / "light", "--device", "cpu").code == 0


def test_neighbors_that_left_out_streams_take_vote_in_rounds(
    vicinal: Any, domains: Path, tmp_path: Path
) -> None:
    assert vicinal("train", domains, *QUICK, "--predictor", "neighbors", "--out", "run").code == 0
    ran = vicinal("evaluate", "run", "--device", "cpu")
    assert ran.code == 0, ran.err
    *_, vnl = read_records(tmp_path / "run" / "records.jsonl")
    assert (vnl.method, vnl.predict) == ("vnl", "neighbors")
    assert vnl.protocol["adapter"].items() >= VOTES["rounds"].items()
    assert vicinal("adapt", "run", domains / "light", "--device", "cpu").code == 0


@pytest.mark.parametrize(("asked", "found"), [("none", set()), ("temperature", {"output_temperature"})])
def test_left_out_streams_say_how_sure_predictions_may_be(
    vicinal: Any, domains: Path, tmp_path: Path, asked: str, found: set[str]
) -> None:
    ran = vicinal("train", domains, *QUICK, "--calibrate", asked, "--out", "run")
    assert ran.code == 0, ran.err
    rule = load(tmp_path / "run").choice["methods"]["vnl"]["stream"]
    assert {"output_temperature", "agreement"} & set(rule) == found
    assert ("to be as sure as it may be" in ran.out) == bool(found)
    ran = vicinal("evaluate", "run", "--methods", "vnl", "--device", "cpu")
    assert ran.code == 0, ran.err
    (vnl,) = read_records(tmp_path / "run" / "records.jsonl")
    told = vnl.protocol["adapter"].get("output_temperature", 1.0)
    assert told == rule.get("output_temperature", 1.0)


def test_agreement_is_offered_where_it_is_asked_for(vicinal: Any, domains: Path, tmp_path: Path) -> None:
    ran = vicinal("train", domains, *QUICK, "--calibrate", "agreement", "--out", "run")
    assert ran.code == 0, ran.err
    asked = load(tmp_path / "run").config["out_of_fold"]
    assert (asked["calibrate"], asked["agreement"]) == (True, True)


def test_weights_can_be_averaged(vicinal: Any, domains: Path, tmp_path: Path) -> None:
    ran = vicinal("train", domains, *BARE, "--average", 0.5, "--out", "run")
    assert ran.code == 0, ran.err
    assert load(tmp_path / "run").config["train"]["average"] == 0.5
    ran = vicinal("train", domains, *BARE, "--average", 0.25, "--out", "run", "--resume")
    assert ran.code != 0
    assert "average was 0.5 and is now 0.25" in " ".join(ran.err.split())
    ran = vicinal("train", domains, *BARE, "--average", 2, "--out", "other")
    assert ran.code != 0
    assert "average is a share of the iterations" in " ".join(ran.err.split())
    assert not (tmp_path / "other").exists()


def test_bad_images_are_counted_listed_and_left_out(vicinal: Any, domains: Path, tmp_path: Path) -> None:
    (domains / "dark" / "left" / "3.png").write_bytes(b"text")
    ran = vicinal("train", domains, *BARE, "--skip-bad", "--out", "run")
    assert ran.code == 0, ran.err
    assert "1 unreadable images" in ran.out
    assert "dark/left/3.png" in ran.out.replace("\n", "")
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_three_domains_are_enough(vicinal: Any, domains_of: Callable[..., Path]) -> None:
    assert vicinal("train", domains_of(dark=10, light=10, mid=10), *QUICK).code == 0


def test_domains_smaller_than_a_batch(vicinal: Any, domains_of: Callable[..., Path]) -> None:
    assert vicinal("train", domains_of(dark=4, dim=5, light=6, mid=7), *QUICK).code == 0


def test_a_loss_that_is_not_finite(vicinal: Any, domains: Path, tmp_path: Path) -> None:
    line = vicinal("train", domains, *BARE, "--backbone-lr", 1e30, "--out", "run").line
    assert "not finite" in line
    assert not list((tmp_path / "run").rglob("*.safetensors*"))


def test_a_full_disk_leaves_the_old_model(
    vicinal: Any, domains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vicinal("train", domains, *BARE, "--out", "run").code == 0
    path = tmp_path / "run" / "model.safetensors"
    before = path.read_bytes()

    def full(tensors: Any, file: Path, metadata: Any = None) -> None:
        Path(file).write_bytes(b"half of a")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "save_file", full)
    line = vicinal("train", domains, *BARE, "--out", "run", "--resume").line
    assert "No space left on device" in line
    assert "intact" in line
    assert path.read_bytes() == before
    assert not list((tmp_path / "run").glob(".*"))


def test_resume_with_other_settings_is_refused(vicinal: Any, domains: Path) -> None:
    assert vicinal("train", domains, *BARE, "--out", "run").code == 0
    line = vicinal("train", domains, *BARE, "--batch-size", 5, "--out", "run", "--resume").line
    assert "batch_size was 4 and is now 5" in line


def test_resume_with_another_target_is_refused(vicinal: Any, domains: Path) -> None:
    assert vicinal("train", domains, *BARE, "--out", "run").code == 0
    other = [word if word != "light" else "dark" for word in BARE]
    assert "dark" in vicinal("train", domains, *other, "--out", "run", "--resume").line


def test_domains_of_a_table_with_any_name_stay_in_one_folder(
    vicinal: Any, domains: Path, tmp_path: Path
) -> None:
    names = {"dark": "a/b", "dim": "c", "mid": "d", "light": "../../up"}
    rows = [
        f"{path.relative_to(domains)},{path.parent.name},{names[path.parent.parent.name]}"
        for path in sorted(domains.rglob("*.png"))
    ]
    (domains / "[table].csv").write_text("\n".join(["path,label,domain", *rows]))
    before = set(tmp_path.iterdir())
    ran = vicinal("train", domains / "[table].csv", *BARE, "--algorithm", "erm", "--target", "../../up")
    assert ran.code == 2, "light is no domain of it"
    words = [word for word in BARE if word not in ("--target", "light")]
    ran = vicinal("train", domains / "[table].csv", *words, "--algorithm", "erm", "--target", "../../up")
    assert ran.code == 0, ran.err
    assert set(tmp_path.iterdir()) - before == {tmp_path / "runs"}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["[table].csv-.._.._up"]
    assert "model in runs/[table].csv-.._.._up/model.safetensors" in ran.out


def test_a_target_that_was_trained_on_is_named(vicinal: Any, domains: Path) -> None:
    assert vicinal("train", domains, *BARE, "--algorithm", "erm", "--out", "run").code == 0
    seen = vicinal("evaluate", "run", "--methods", "erm", "--target", "dark", "--device", "cpu")
    assert "the model was trained on 'dark'" in seen.out
    unseen = vicinal("evaluate", "run", "--methods", "erm", "--target", "light", "--device", "cpu")
    assert "was trained on" not in unseen.out


def test_interrupt_and_resume_give_the_model_of_one_go(
    vicinal: Any, domains: Path, tmp_path: Path, same_tensors: Any
) -> None:
    long = (*BASE, "--batch-size", 4, "--iterations", 400, "--algorithm", "erm", "--no-out-of-fold")
    words = [str(word) for word in ("train", domains, *long, "--out", tmp_path / "cut")]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(
        [*COMMAND, *words],
        env=os.environ | threads,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    _wait_for(tmp_path / "cut" / "scalars.jsonl", process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    (line,) = said.splitlines()
    stopped = re.search(r"stopped at iteration (\d+) of 400; .*--resume", line)
    assert stopped is not None, line
    assert 10 <= int(stopped[1]) < 400
    assert [path.name for path in (tmp_path / "cut").glob("*.safetensors")] == ["state-erm.safetensors"]
    assert vicinal("train", domains, *long, "--out", "cut", "--resume").code == 0
    assert vicinal("train", domains, *long, "--out", "whole").code == 0
    assert same_tensors(load(tmp_path / "cut"), load(tmp_path / "whole"))


def _wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    """Return once the training has written its first figures."""
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_interrupt_during_the_choice_stops(
    vicinal: Any, domains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Bars.start

    def interrupted(self: Bars, task: str, total: int, done: int = 0) -> None:
        start(self, task, total, done)
        if task == "choose":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Bars, "start", interrupted)
    assert vicinal("train", domains, *QUICK, "--out", "run").code != 0
