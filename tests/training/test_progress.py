"""Ctrl-C: a request that the loop grants, and a state that the run goes on from."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vicinal.checkpoint import Trained, load, read_tensors
from vicinal.data.digits import load_digits_domains
from vicinal.data.domains import assign_roles
from vicinal.models.backbones import preprocessing_for
from vicinal.training.config import TrainConfig
from vicinal.training.progress import stop_on_interrupt
from vicinal.training.train import ModelSpec, train

TensorsOf = Callable[[Trained], dict[str, Tensor]]
SameTensors = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], bool]


def test_the_first_interrupt_is_a_request_and_the_second_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt() as stop:
        assert not stop.asked
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_handler_is_given_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="mine"), stop_on_interrupt():
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with stop_on_interrupt() as stop:
            seen.append((stop.asked, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


DIGITS = TrainConfig(algorithm="meta", iterations=200, batch_size=8, group_size=4, validate_every=5)
CHILD = """
import sys, torch
from pathlib import Path
from vicinal.data.digits import load_digits_domains
from vicinal.data.domains import assign_roles
from vicinal.errors import TrainingError
from vicinal.models.backbones import preprocessing_for
from vicinal.training.config import TrainConfig
from vicinal.training.train import ModelSpec, train

torch.set_num_threads(int(sys.argv[2]))
roles = assign_roles(load_digits_domains(size=8, angles=(0, 30, 60)), ["60"])
spec = ModelSpec("small", "none", preprocessing_for("small", channels=1, size=8), roles.classes)
config = TrainConfig(algorithm="meta", iterations=200, batch_size=8, group_size=4, validate_every=5)
try:
    train(spec, roles.sources, config, folder=Path(sys.argv[1]))
except TrainingError as error:
    print(error)
    sys.exit(3)
"""


def test_control_c_leaves_a_state_that_ends_in_the_same_model(
    tmp_path: Path, tensors_of: TensorsOf, same_tensors: SameTensors
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), str(torch.get_num_threads())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    scalars = tmp_path / "scalars.jsonl"
    deadline = time.monotonic() + 60
    while (
        not (scalars.exists() and scalars.read_text())
        and child.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    said, wrong = child.communicate(timeout=60)
    assert child.returncode == 3, wrong
    assert "stopped at iteration" in said
    assert "Traceback" not in wrong
    header = read_tensors(tmp_path / "state-meta.safetensors")[1]
    assert 0 < header["iteration"] < DIGITS.iterations
    assert not (tmp_path / "model.safetensors").exists()
    roles = assign_roles(load_digits_domains(size=8, angles=(0, 30, 60)), ["60"])
    spec = ModelSpec("small", "none", preprocessing_for("small", channels=1, size=8), roles.classes)
    resumed = train(spec, roles.sources, DIGITS, folder=tmp_path, resume=True)
    whole = train(spec, roles.sources, DIGITS)
    assert same_tensors(tensors_of(resumed), tensors_of(whole))
    assert same_tensors(tensors_of(load(tmp_path)), tensors_of(whole))
