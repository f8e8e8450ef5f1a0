"""The adapted model alone: a plain frozen module, a program of torch.export, or an ONNX file.

What is exported is the model with the weights and statistics that adaptation has arrived at. Labels that a
method infers anew for every batch, from a memory or from neighbors, stay with the adapter.
"""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from vicinal.adapters.contract import HALF, Adapter, as_it_is
from vicinal.errors import AdapterError

LATEST = 18  # ONNX operator set


def frozen(adapter: Adapter, x: Tensor | None = None) -> nn.Module:
    """Return a copy of the model that predicts, in evaluation mode: it takes images, returns logits (N, C).

    A model on batch or blended statistics normalizes each batch by itself; a frozen one cannot, so its
    statistics are settled on the images x. The adapter is left as it is.
    """
    predictor = adapter.predictor
    if predictor[1].per_batch and x is None:
        raise AdapterError(
            f"statistics of kind '{adapter.settings.statistics.kind}' are each batch's own: pass images to "
            "settle them on, as in adapter.export(images)"
        )
    model, norm = copy.deepcopy(predictor)
    if norm.per_batch and x is not None:
        norm.begin()
        with as_it_is(model):
            norm.freeze(model, adapter.checked(x))
    model = model.eval().requires_grad_(False)
    model.precision = None  # who predicts with it decides for himself
    return model.to(adapter.output_dtype) if adapter.output_dtype in HALF else model


def save_program(module: nn.Module, example: Tensor, path: str | Path) -> None:
    """Write a module as a program of torch.export that takes any number of images."""
    torch.export.save(program(module, example), Path(path))


def program(module: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """Return a module as a program of torch.export; example images fix all shapes but their number."""
    # torch.export takes a size of one for a constant.
    images = example if len(example) > 1 else example.repeat(2, 1, 1, 1)
    return torch.export.export(module.eval(), (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))


def save_onnx(module: nn.Module, example: Tensor, path: str | Path) -> None:
    """Write a module as an ONNX file that takes any number of images; needs the extra `onnx`."""
    try:
        import onnxscript  # noqa: F401  what torch.onnx writes with
    except ImportError:
        raise AdapterError("ONNX files need another package: pip install 'vicinal[onnx]'") from None
    written = torch.onnx.export(program(module, example), opset_version=LATEST, dynamo=True)
    assert written is not None
    written.save(str(path))
