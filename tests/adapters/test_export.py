"""The exported model says what the adapter says, alone and frozen, whatever the statistics."""

from pathlib import Path
from typing import Any

import pytest
import torch

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.export import program, save_onnx, save_program
from vicinal.adapters.guard import Guarded
from vicinal.adapters.methods import METHODS, adapt
from vicinal.adapters.statistics import KINDS
from vicinal.errors import AdapterError


def told(make_source: Any, images: Any, kind: str, backbone: str = "small") -> tuple[Any, torch.Tensor]:
    adapter = adapt(make_source(backbone=backbone), "soft", statistics=kind, lr=1e-2)
    adapter(images(6))
    return adapter, adapter(images(6, seed=1))


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_the_adapter_said_last(make_source: Any, images: Any, kind: str) -> None:
    adapter, logits = told(make_source, images, kind)
    before = {name: value.clone() for name, value in adapter.model.state_dict().items()}
    module = adapter.export(images(6, seed=1) if kind in ("batch", "blend") else None)
    torch.testing.assert_close(module(images(6, seed=1)), logits)
    again = module(images(6, seed=1))
    assert not again.requires_grad
    assert not any(part.training for part in module.modules())
    assert all(torch.equal(value, before[name]) for name, value in adapter.model.state_dict().items())
    # Frozen: an image is predicted as it would be in any other company.
    torch.testing.assert_close(module(images(6, seed=1)[:2]), again[:2])


@pytest.mark.parametrize("images_before", [0, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_one_image_at_a_time_runs_on_what_the_stream_left(
    make_source: Any, images: Any, kind: str, images_before: int
) -> None:
    adapter = adapt(make_source(), "soft", statistics=kind, lr=1e-2)
    if images_before:
        adapter(images(images_before))
    for seed in range(1, 4):
        logits = adapter(images(1, seed=seed))
    module = adapter.export(images(1, seed=3) if kind in ("batch", "blend") else None)
    torch.testing.assert_close(module(images(1, seed=3)), logits)
    if kind in ("batch", "blend"):  # a batch in between does not run on the stream
        adapter(images(6, seed=8))
        before = adapter.norm.seen.clone()
        assert adapter.export(images(1, seed=3))(images(1, seed=3)).isfinite().all()
        assert adapter.norm.seen == before


# These predict by what stays with the adapter, or anew for every image; three need heads of their training.
OTHERS = {"labels", "lame", "memo", "single_sample", "t3a", "tast", "tast_bn", "ttt", "ttt_pp"}
TRAINED_AS = {"neighbor": "neighbor", "vnl_paper": "meta"}


@pytest.mark.parametrize("kind", ["batch", "stream"])
@pytest.mark.parametrize("method", sorted({*METHODS} - OTHERS))
def test_it_is_the_model_that_predicts(make_source: Any, images: Any, method: str, kind: str) -> None:
    """Such as the teacher, where there is one."""
    source = make_source(TRAINED_AS.get(method, "erm"))
    adapter = adapt(source, method, statistics=kind, predict="own", lr=1e-2)
    for seed in range(12):
        logits = adapter(images(12, seed=seed))
    module = adapter.export(images(12, seed=11) if kind == "batch" else None)
    torch.testing.assert_close(module(images(12, seed=11)), logits)


@pytest.mark.parametrize("kind", ["batch", "blend"])
def test_statistics_of_each_batch_need_images_to_settle_on(make_source: Any, images: Any, kind: str) -> None:
    adapter, _ = told(make_source, images, kind)
    with pytest.raises(AdapterError, match=r"pass images to settle them on, as in adapter\.export\(images\)"):
        adapter.export()


@pytest.mark.parametrize("backbone", ["small_gn", "small_ln", "small_none"])
def test_without_batch_normalization_nothing_has_to_settle(
    make_source: Any, images: Any, backbone: str
) -> None:
    adapter, logits = told(make_source, images, "batch", backbone)
    torch.testing.assert_close(adapter.export()(images(6, seed=1)), logits)


def test_it_goes_on_alone(make_source: Any, images: Any) -> None:
    adapter, _ = told(make_source, images, "stream")
    module = Guarded(adapter).export()
    before = module(images(4))
    adapter(images(6, seed=3))
    assert torch.equal(module(images(4)), before)
    assert not torch.equal(adapter.export()(images(4)), before)


def test_a_model_in_half_precision_is_given_back_in_half_precision() -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3)).bfloat16()
    module = adapt(net, "soft", lr=1e-2).export()
    assert next(module.parameters()).dtype == torch.bfloat16
    assert module(torch.rand(2, 3, 2, 2).bfloat16()).dtype == torch.bfloat16


def test_the_program_takes_any_number_of_images(make_source: Any, images: Any, tmp_path: Path) -> None:
    adapter, _ = told(make_source, images, "stream")
    module = adapter.export()
    for example in (images(3), images(1)):
        save_program(module, example, tmp_path / "model.pt2")
        loaded = torch.export.load(tmp_path / "model.pt2").module()
        for count in (1, 2, 9):
            torch.testing.assert_close(loaded(images(count)), module(images(count)))


def test_a_model_of_ones_own_becomes_a_program(images: Any) -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(5)
    )
    net(torch.rand(1, 3, 8, 8))
    module = adapt(net, "soft").export()
    x = images(3).float()
    torch.testing.assert_close(program(module, x).module()(x), net(x))


def test_onnx_or_one_line_that_says_what_is_missing(make_source: Any, images: Any, tmp_path: Path) -> None:
    module, path = adapt(make_source(), "soft", statistics="stream").export().float(), tmp_path / "model.onnx"
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        with pytest.raises(AdapterError, match=r"pip install 'vicinal\[onnx\]'"):
            save_onnx(module, images(2).float(), path)
        pytest.skip("onnxscript is not installed")
    save_onnx(module, images(2).float(), path)
    onnx = pytest.importorskip("onnx")
    shape = onnx.load(str(path)).graph.input[0].type.tensor_type.shape.dim
    assert shape[0].dim_param
    assert [dim.dim_value for dim in shape[1:]] == [3, 8, 8]
