"""A stream that is written to a file goes on bit for bit, in a fresh adapter and in another process."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vicinal
from vicinal.adapters import persist
from vicinal.adapters.guard import GuardConfig, Guarded
from vicinal.adapters.methods import METHODS, adapt
from vicinal.adapters.persist import load_adapter
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.adapters.watch import Limits
from vicinal.checkpoint import Trained, load, read_tensors, write_tensors
from vicinal.data.augment import Augment
from vicinal.data.augmix import AugMix
from vicinal.errors import AdapterError, CheckpointError, ConfigError
from vicinal.functional.peers_consistency import feature_moments
from vicinal.models.auxiliary import as_extras, projection_head, rotation_head
from vicinal.models.single_sample import SampleInferenceNet

ALGORITHMS = {"neighbor": "neighbor", "vnl_paper": "meta"}
HARD = {"memo": {"views": 2}, "cotta": {"views": 2}}


class Bare(nn.Module):
    """A net that was not built here."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.last = nn.Linear(6, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(x).mean((2, 3)))


@torch.no_grad()
def with_extras(source: Trained, x: Tensor) -> Trained:
    """Return a source with what training leaves for `ttt`, `ttt_pp` and `single_sample`, at random."""
    torch.manual_seed(4)
    width, z = source.model.head.in_features, source.model.embed(x)
    rotation, projection = rotation_head(width).double(), projection_head(width, 8).double()
    source.extras |= {**as_extras("ttt", rotation), **as_extras("ttt_pp.head", projection)}
    source.extras |= as_extras("single_sample", SampleInferenceNet(width, hidden=16).double())
    for name, value in (("features", z), ("projection", projection(z))):
        moments = {**feature_moments(value)._asdict(), "distances": value.new_tensor([1e-2, 1e-3])}
        source.extras |= {f"ttt_pp.{name}.{what}": number for what, number in moments.items()}
    return source


def methods() -> list[str]:
    return sorted(METHODS)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("method", methods())
def test_a_stream_goes_on_bit_for_bit(
    make_source: Any, images: Any, tmp_path: Path, method: str, guarded: bool
) -> None:
    source = with_extras(make_source(ALGORITHMS.get(method, "erm")), images(64, seed=98))
    made = adapt(source, method, seed=5, lr=1e-2, **HARD.get(method, {}))
    adapter = Guarded(made, GuardConfig(spacing=1)) if guarded else made
    for seed in range(3):
        adapter(images(6, seed=seed))
    adapter.save(tmp_path / "stream.safetensors")
    other = load_adapter(tmp_path / "stream.safetensors")
    assert type(other) is type(adapter)
    assert other.settings == adapter.settings
    for seed in range(3, 6):
        assert torch.equal(other(images(6, seed=seed)), adapter(images(6, seed=seed)))
    other.reset()
    adapter.reset()
    assert torch.equal(other(images(6)), adapter(images(6)))


def test_a_guard_comes_back_with_its_limits(make_source: Any, images: Any, tmp_path: Path) -> None:
    config = GuardConfig(varied=Limits(agreement=0.3, doubt=0.6, excess_entropy=0.2), pool=30)
    guarded = Guarded(adapt(make_source(), "soft"), config)
    guarded(images(6))
    guarded.save(tmp_path / "stream.safetensors")
    other = load_adapter(tmp_path / "stream.safetensors")
    assert isinstance(other, Guarded)
    assert other.config == config
    assert other.watch == guarded.watch


def test_it_goes_on_in_another_process(make_source: Any, images: Any, tmp_path: Path) -> None:
    adapter = adapt(make_source(), "vnl", lr=1e-2)
    adapter(images(6))
    adapter.save(tmp_path / "stream.safetensors")
    torch.save(images(5, seed=9), tmp_path / "next.pt")
    code = (
        "import torch, vicinal; a = vicinal.load_adapter('stream.safetensors');"
        "torch.save(a(torch.load('next.pt')), 'out.pt')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert torch.equal(torch.load(tmp_path / "out.pt"), adapter(images(5, seed=9)))


def test_the_source_is_stored_as_the_adapter_found_it(make_source: Any, images: Any, tmp_path: Path) -> None:
    source = make_source()
    expected = adapt(source, "soft")(images(6))
    for inplace in (False, True):
        adapter = adapt(source, "soft", inplace=inplace)
        adapter(images(6, seed=1))
        if not inplace:
            with torch.no_grad():  # its owner goes on with it
                source.model.head.weight.zero_()
        adapter.save(tmp_path / "stream.safetensors")
        other = load_adapter(tmp_path / "stream.safetensors")
        other.reset()
        assert torch.equal(other(images(6)), expected)
        source = make_source()


def test_settings_of_every_method_come_back_as_they_were() -> None:
    for name in METHODS:
        entry = METHODS[name]
        stored = json.loads(json.dumps(persist.encoded(entry.defaults)))
        assert persist.decoded(stored, entry) == entry.defaults
    told = METHODS["soft"].defaults
    for view in (Augment(0.5), AugMix(severity=2, crop=Augment(0.6)), AugMix(crop=None)):
        settings = type(told)(augment=view, statistics=StatisticsConfig("blend", source_images=7))
        stored = json.loads(json.dumps(persist.encoded(settings)))
        assert persist.decoded(stored, METHODS["soft"]) == settings


def test_nested_states_come_back_as_they_were() -> None:
    tensors: dict[str, torch.Tensor] = {}
    state = {"a": {0: {"m": torch.ones(2)}, 3: [1, (2.5, None, True)]}, "pairs": "x", "b": torch.zeros(())}
    plain = json.loads(json.dumps(persist.flattened(state, "s.", tensors)))
    found = persist.unflattened(plain, tensors)
    assert found["a"][3] == [1, (2.5, None, True)]
    assert torch.equal(found["a"][0]["m"], torch.ones(2))
    assert (found["pairs"], float(found["b"])) == ("x", 0.0)
    with pytest.raises(AdapterError, match="not set"):
        persist.flattened({"a": {1, 2}}, "s.", tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_ones_own_is_brought_again(tmp_path: Path, images: Any, dtype: torch.dtype) -> None:
    net = Bare().to(dtype)
    adapter = Guarded(adapt(net, "soft", head="last", lr=1e-2))
    x = images(6).float()
    adapter(x)
    adapter.save(tmp_path / "own.safetensors")
    with pytest.raises(AdapterError, match=r"pass it again, as in load_adapter\(path, model\)"):
        load_adapter(tmp_path / "own.safetensors")
    other = load_adapter(tmp_path / "own.safetensors", copy.deepcopy(net))
    assert torch.equal(other(x), adapter(x))
    assert other.model.head_name == "last"
    with pytest.raises(CheckpointError, match=r"does not fit this model, .*\(4, 6\) in the file, \(5, 6\)"):
        load_adapter(tmp_path / "own.safetensors", Bare(5).to(dtype))
    with pytest.raises(AdapterError, match="move it there first"):
        load_adapter(tmp_path / "own.safetensors", net, device="cpu")


def test_a_model_of_other_weights_is_not_the_one_that_was_saved(tmp_path: Path, images: Any) -> None:
    path, net = tmp_path / "own.safetensors", Bare()
    adapter, x = adapt(net, "soft", head="last", lr=1e-2), images(6).float()
    adapter(x)
    adapter.save(path)
    for tensor in (net.last.bias, net.body[1].running_var):
        other = copy.deepcopy(net)
        name = next(found for found, value in net.state_dict(keep_vars=True).items() if value is tensor)
        other.state_dict()[name][0] += 1e-3
        with pytest.raises(AdapterError, match="a model of other weights: pass that one"):
            load_adapter(path, other)
    tensors, header = read_tensors(path)
    del header["weights"]  # as files were written before
    write_tensors(path, tensors, header)
    assert torch.equal(load_adapter(path, other)(x), adapter(x))


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_here_is_said_in_one_line(make_source: Any, tmp_path: Path, device: str) -> None:
    path = tmp_path / "file.safetensors"
    vicinal.save(path, make_source())
    with pytest.raises(ConfigError, match=rf"no device '{device}' here \(.*choose 'cpu'") as caught:
        vicinal.load(path, device=device)
    assert "\n" not in str(caught.value)
    adapt(make_source(), "soft").save(path)
    with pytest.raises(ConfigError, match=rf"no device '{device}' here"):
        load_adapter(path, device=device)


def test_random_numbers_of_another_device(make_source: Any, images: Any, tmp_path: Path) -> None:
    path = tmp_path / "stream.safetensors"
    for method, drawn in (("soft", False), ("labels", True)):
        adapter = adapt(make_source(), method)
        adapter(images(6))
        adapter.save(path)
        tensors, header = read_tensors(path)
        assert header["drawn"] == drawn
        header["device"] = "cuda"  # as if it had run there: its generator's state would be 16 bytes
        write_tensors(path, tensors, header)
        if drawn:
            with pytest.raises(AdapterError, match="drawn on cuda and cannot go on on cpu"):
                load_adapter(path)
        else:
            assert torch.equal(load_adapter(path)(images(4)), adapter(images(4)))


def test_files_that_are_none_are_refused_in_one_line(make_source: Any, images: Any, tmp_path: Path) -> None:
    path = tmp_path / "stream.safetensors"
    adapter = adapt(make_source(), "soft")
    adapter.save(path)
    whole, (tensors, header) = path.read_bytes(), read_tensors(path)
    wrong = {
        "nothing": lambda: path.unlink(),
        "cut": lambda: path.write_bytes(whole[: len(whole) // 2]),
        "a model": lambda: vicinal.save(path, make_source()),
        "no method": lambda: write_tensors(path, tensors, {**header, "method": "none"}),
        "no state": lambda: write_tensors(path, tensors, {k: v for k, v in header.items() if k != "state"}),
        "fewer tensors": lambda: write_tensors(path, dict(list(tensors.items())[:-1]), header),
        "odd settings": lambda: write_tensors(path, tensors, {**header, "settings": {"class": "os"}}),
    }
    for name, spoil in wrong.items():
        path.write_bytes(whole)
        spoil()
        with pytest.raises(CheckpointError) as caught:
            load_adapter(path)
        assert "\n" not in str(caught.value), name
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"holds the state of an adapter.*load_adapter"):
        load(path)
