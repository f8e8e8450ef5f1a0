"""What a record says of a machine."""

from pathlib import Path

import pytest
import torch

from vicinal.benchmarks.bench import machine
from vicinal.benchmarks.bench.machine import all_versions, cpu_model, device_name, gpu_versions
from vicinal.versions import versions

CPU = torch.device("cpu")


def test_versions_of_a_cpu_name_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "made_by", lambda: {**versions(), "commit": "abc"})
    assert all_versions(CPU) == {**versions(), "commit": "abc"}


def test_a_gpu_has_three_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_versions() == {"cuda": "12.8", "cudnn": "91002"}  # there is no tool to ask for the driver
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 570.1\necho 570.1\n")
    tool.chmod(0o755)
    assert gpu_versions()["driver"] == "570.1"


def test_the_processor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text("processor\t: 0\nmodel name\t: A Fast One @ 3 GHz\nmodel name\t: A Fast One @ 3 GHz\n")
    assert cpu_model(facts) == "A Fast One @ 3 GHz"
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert cpu_model(tmp_path / "nowhere") == "arm"
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert cpu_model(tmp_path / "nowhere") == "aarch64"


def test_the_device_is_named() -> None:
    assert device_name(CPU) == f"CPU, {cpu_model()}, {torch.get_num_threads()} threads"
