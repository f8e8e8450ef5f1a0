"""How fast images reach the network, against torchvision's ImageFolder + DataLoader + v2 transforms.

    python benchmarks/data_throughput.py IMAGES [--device cuda] [--out results.json]

IMAGES is a folder of class folders. Both sides read the same images and make the same augmented batches:
resized crop, flip, colour jitter, grayscale, floats in [0, 1] on the device. torchvision runs both ways its
documentation has, on tensors and on Pillow images; the faster one counts. All ratios are taken in one run,
the sides measured in turn. The last part trains a ResNet-18 and says which share of a step goes to its
batches: the same steps are timed on fresh batches and on one that never changes.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import timm
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from vicinal.data.augment import Augment
from vicinal.data.cache import decode_cached
from vicinal.data.domains import LabelledImages, SourceDomain
from vicinal.data.episodes import Episodes, from_all
from vicinal.data.files import plain_file
from vicinal.data.images import Decoding
from vicinal.data.pixels import Pixels, resident
from vicinal.versions import versions

AUGMENT = Augment(0.7, 4 / 3, True, brightness=0.3, contrast=0.3, saturation=0.3, hue=0.3, gray=0.1)
ROUNDS = 3

Batches = Iterator[tuple[Tensor, Tensor]]


def torchvision_batches(
    folder: Path, size: int, batch: int, workers: int, device: torch.device, tensors: bool
) -> Batches:
    """Yield batches of a DataLoader whose workers decode and augment, as tensors of bytes or with Pillow."""
    transform = v2.Compose(
        [
            v2.ToImage() if tensors else v2.Identity(),
            v2.RandomResizedCrop(size, scale=(AUGMENT.min_scale, 1.0), ratio=(3 / 4, 4 / 3), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(AUGMENT.brightness, AUGMENT.contrast, AUGMENT.saturation, AUGMENT.hue),
            v2.RandomGrayscale(AUGMENT.gray),
            v2.Identity() if tensors else v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    loader = DataLoader(
        ImageFolder(str(folder), transform),
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )
    while True:
        for x, y in loader:
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


def vicinal_sources(folder: Path, size: int, cache: Path) -> tuple[list[SourceDomain], float, float]:
    """Return the images as one source domain, and the seconds of the first decoding and of a warm start."""
    found = ImageFolder(str(folder))
    files = [plain_file(Path(path)) for path, _ in found.samples]
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        decoded = decode_cached(files, Decoding(size, 3), cache)
        seconds.append(time.perf_counter() - started)
    decoded.images.sum()  # the cache is warm: every page has been touched
    labels = torch.tensor(found.targets)
    part = LabelledImages(Pixels(decoded.images, torch.arange(len(labels))), labels)
    return [SourceDomain("all", part, part)], seconds[0], seconds[1]


def on_device(sources: list[SourceDomain], device: torch.device) -> list[SourceDomain]:
    """Return the sources with their images on the device, if they fit."""
    images = resident([source.train.images for source in sources], device)
    parts = [LabelledImages(x, s.train.labels) for x, s in zip(images, sources, strict=True)]
    return [SourceDomain(s.name, part, part) for s, part in zip(sources, parts, strict=True)]


def vicinal_batches(sources: list[SourceDomain], batch: int, device: torch.device) -> Batches:
    """Yield augmented batches of the project's own episodes."""
    episodes = Episodes(sources, from_all, batch // 2, AUGMENT, device)
    state = torch.Generator().manual_seed(0).get_state()
    for episode in episodes.starting_at(state, 1 << 40):
        yield episode.batches[0]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def rate(batches: Batches, seconds: float, device: torch.device) -> float:
    """Return batches per second, after a start that does not count."""
    for _ in islice(batches, 5):
        pass
    synchronize(device)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        for _ in islice(batches, 4):
            count += 1
        if count % 64 == 0:
            synchronize(device)
    synchronize(device)
    return count / (time.perf_counter() - started)


def training_step(device: torch.device, classes: int, half: bool) -> Callable[[Tensor, Tensor], None]:
    """Return a step of a ResNet-18 under Adam."""
    model = timm.create_model("resnet18", num_classes=classes).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, fused=device.type == "cuda")
    mean, std = (
        torch.tensor(values, device=device).view(1, 3, 1, 1)
        for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )

    def step(x: Tensor, y: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            x = ((x - mean) / std).contiguous(memory_format=torch.channels_last)
            loss = cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def step_seconds(
    step: Callable[[Tensor, Tensor], None], batches: Batches, steps: int, device: torch.device
) -> float:
    for x, y in islice(batches, 3):
        step(x, y)
    synchronize(device)
    started = time.perf_counter()
    for x, y in islice(batches, steps):
        step(x, y)
    synchronize(device)
    return (time.perf_counter() - started) / steps


def waiting(
    sources: list[SourceDomain], batch: int, steps: int, device: torch.device, half: bool
) -> dict[str, float]:
    """Return the milliseconds of a step on fresh batches and on one that stays, and the share between."""
    classes = int(sources[0].train.labels.max()) + 1
    step = training_step(device, classes, half)
    fresh, fixed = [], []
    feed = vicinal_batches(sources, batch, device)
    one = next(feed)
    for _ in range(ROUNDS):
        fresh.append(step_seconds(step, feed, steps, device))
        fixed.append(step_seconds(step, cycle([one]), steps, device))
    with_data, without = statistics.median(fresh), statistics.median(fixed)
    return {"fresh_ms": 1e3 * with_data, "fixed_ms": 1e3 * without, "share": 1 - without / with_data}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=None, help="default: 64 on a CPU, 140 on a GPU")
    parser.add_argument("--workers", type=int, default=torch.get_num_threads(), help="of the DataLoader")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument(
        "--steps", type=int, default=None, help="of training, 0 for none; default: 4 on a CPU, 100 on a GPU"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    batch = args.batch or (140 if gpu else 64)
    steps = (100 if gpu else 4) if args.steps is None else args.steps
    with tempfile.TemporaryDirectory() as cache:
        on_disk, cold, warm = vicinal_sources(args.images, args.size, Path(cache))
        sources = on_device(on_disk, device)
        ours, tensors, pillow, mapped = [], [], [], []
        loader = partial(torchvision_batches, args.images, args.size, batch, args.workers, device)
        for _ in range(ROUNDS):
            tensors.append(rate(loader(tensors=True), args.seconds, device))
            pillow.append(rate(loader(tensors=False), args.seconds, device))
            ours.append(rate(vicinal_batches(sources, batch, device), args.seconds, device))
            if gpu:
                mapped.append(rate(vicinal_batches(on_disk, batch, device), args.seconds / 2, device))
        theirs = max(tensors, pillow, key=statistics.median)
        result = {
            "images": len(on_disk[0].train),
            "batch": batch,
            "device": torch.cuda.get_device_name() if gpu else "cpu",
            "threads": torch.get_num_threads(),
            "loader_workers": args.workers,
            "decode_seconds": cold,
            "warm_start_seconds": warm,
            "torchvision_tensor_batches_per_second": statistics.median(tensors),
            "torchvision_pillow_batches_per_second": statistics.median(pillow),
            "vicinal_batches_per_second": statistics.median(ours),
            "ratio": statistics.median(ours) / statistics.median(theirs),
            "ratio_each_round": [a / b for a, b in zip(ours, theirs, strict=True)],
            "versions": versions(),
        }
        if steps:
            result["waiting"] = waiting(sources, batch, steps, device, half=False)
        if gpu and steps:
            result["memory_mapped_batches_per_second"] = statistics.median(mapped)
            result["waiting_bf16"] = waiting(sources, batch, steps, device, half=True)
            result["waiting_memory_mapped"] = waiting(on_disk, batch, steps, device, half=False)
            result["waiting_memory_mapped_bf16"] = waiting(on_disk, batch, steps, device, half=True)
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
