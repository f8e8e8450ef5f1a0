"""What a step of every method costs, against the bare arithmetic of its own passes and against inference.

    python benchmarks/adapter_cost.py [--device cuda] [--out results.json]

A step is recorded once: every forward pass of a network (how many images, with or without a gradient, on
which statistics), every backward pass, every optimizer step. The same sequence is then played on a plain copy
of the net with nothing around it. Step and replay are timed in turn, and the ratio is taken round by round.
What a method computes besides passes (labels, memories, augmentation) is its overhead.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import timm
import torch
from torch import Tensor, nn

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import METHODS, adapt
from vicinal.checkpoint import Trained
from vicinal.errors import VicinalError
from vicinal.functional.peers_consistency import feature_moments
from vicinal.models.auxiliary import as_extras, projection_head, rotation_head
from vicinal.models.backbones import Preprocessing
from vicinal.models.classifier import Classifier
from vicinal.models.inference import InferenceNet, StreamInferenceNet
from vicinal.models.single_sample import SampleInferenceNet
from vicinal.versions import versions

CLASSES = 7
ALGORITHM = {"neighbor": "neighbor", "vnl_paper": "meta"}
# Fewer views than in the papers; filters let everything pass, so that the dearest step is measured.
TOLD = {
    "memo": {"views": 8},
    "cotta": {"views": 8},
    "eata": {"margin": 0.95, "similarity": 2.0},
    "sar": {"margin": 0.95},
    "pl": {"threshold": 0.0},
    "shot_im": {"threshold": 0.0},
}


def source(backbone: str, size: int, device: torch.device) -> Trained:
    """Return a model with random weights and random phis: cost does not depend on what they know."""
    features = timm.create_model(backbone, num_classes=0)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    model = Classifier(features, features.num_features, CLASSES, list(mean), list(std)).eval()
    model.head.weight.data *= 100  # certain, as a trained model is
    nets = {
        "phi": InferenceNet(features.num_features),
        "anchor_phi": StreamInferenceNet(32, 2, 0.9, 20),
        "predict_phi": StreamInferenceNet(32, 2, 0.9, 20),
    }
    width = features.num_features
    projection = projection_head(width, 128)
    z = torch.randn(64, width)
    extras = {
        **as_extras("single_sample", SampleInferenceNet(width)),
        **as_extras("ttt", rotation_head(width)),
        **as_extras("ttt_pp.head", projection),
    }
    for name, value in (("features", z), ("projection", projection(z).detach())):
        moments = {**feature_moments(value)._asdict(), "distances": value.new_tensor([1e-2, 1e-3])}
        extras |= {f"ttt_pp.{name}.{what}": number for what, number in moments.items()}
    names = tuple(str(number) for number in range(CLASSES))
    trained = Trained(
        model,
        backbone,
        names,
        Preprocessing(size, 3, mean, std),
        "erm",
        **nets,
        extras={n: v.to(device) for n, v in extras.items()},
    )
    for net in (model, *nets.values()):
        net.to(device)
    return trained


Event = tuple[str, tuple[int, ...], bool, bool]


@contextmanager
def recording(adapter: Adapter, events: list[Event]) -> Iterator[None]:
    """Note every pass and step while the block runs."""
    nets = [module for module in adapter.modules() if isinstance(module, Classifier)]
    norms = {id(net): next((m for m in net.modules() if isinstance(m, nn.BatchNorm2d)), None) for net in nets}

    def watch(net: nn.Module) -> Callable[..., None]:
        def see(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            norm = norms[id(net)]
            events.append(
                ("forward", tuple(inputs[0].shape), torch.is_grad_enabled(), bool(norm and norm.training))
            )

        return see

    def note(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            events.append((kind, (), False, False))
            return call(*args, **options)

        return noted

    with ExitStack() as stack:
        for net in nets:
            stack.callback(net.features.register_forward_pre_hook(watch(net)).remove)
        stack.enter_context(mock.patch.object(Tensor, "backward", note("backward", Tensor.backward)))
        if adapter.optimizer is not None:
            kind = type(adapter.optimizer)
            stack.enter_context(mock.patch.object(kind, "step", note("step", kind.step)))
        yield


def replay(adapter: Adapter, events: list[Event], x: Tensor) -> Callable[[], None]:
    """Return a function that plays the recorded passes on a plain copy of the net."""
    net = copy.deepcopy(adapter.model)
    chosen = [p for p in net.parameters() if p.requires_grad]
    optimizer = None
    if adapter.optimizer is not None and chosen:
        defaults = {k: v for k, v in adapter.optimizer.defaults.items() if k in ("lr", "momentum", "betas")}
        optimizer = type(adapter.optimizer)(chosen, **defaults)
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    inputs = {shape: torch.rand(shape, device=x.device) for kind, shape, _, _ in events if kind == "forward"}

    again = [_comes_again(events[place + 1 :]) for place in range(len(events))]

    def play() -> None:
        logits = None
        for (kind, shape, grad, training), kept in zip(events, again, strict=True):
            if kind == "forward":
                for norm in norms:
                    norm.train(training)
                with torch.set_grad_enabled(grad):
                    found = net.head(net.features(inputs[shape]))
                logits = found if grad else logits
            elif kind == "backward" and logits is not None and logits.requires_grad:
                for parameter in chosen:
                    parameter.grad = None
                logits.logsumexp(-1).mean().backward(retain_graph=kept)
            elif kind == "step" and optimizer is not None and chosen and chosen[0].grad is not None:
                optimizer.step()

    return play


def _comes_again(later: list[Event]) -> bool:
    """Return whether a backward pass follows before the next forward pass that one can be taken of."""
    for kind, _, grad, _ in later:
        if kind == "backward" or (kind == "forward" and grad):
            return kind == "backward"
    return False


def seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def measure(
    trained: Trained, name: str, x: Tensor, repeats: int, rounds: int, inference: Callable[[], Any]
) -> dict[str, Any]:
    trained.algorithm = ALGORITHM.get(name, "erm")
    adapter = adapt(trained, name, **TOLD.get(name, {}))
    adapter(x)
    events: list[Event] = []
    with recording(adapter, events):
        adapter(x)
    bare = replay(adapter, events, x)
    for work in (bare, lambda: adapter(x)):
        work()
    rounds = [
        (
            seconds(lambda: adapter(x), x.device, repeats),
            seconds(bare, x.device, repeats),
            seconds(inference, x.device, repeats),
        )
        for _ in range(rounds)
    ]
    forwards = [event for event in events if event[0] == "forward"]
    return {
        "method": name,
        "step_ms": 1e3 * statistics.median(step for step, _, _ in rounds),
        "overhead": statistics.median(step / plain for step, plain, _ in rounds) - 1,
        "times_inference": statistics.median(step / one for step, _, one in rounds),
        "forward_passes": len(forwards),
        "forward_images": sum(shape[0] for _, shape, _, _ in forwards),
        "backward_passes": sum(event[0] == "backward" for event in events),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--methods", default="all")
    parser.add_argument("--repeats", type=int, default=None, help="default: 1 on a CPU, 10 on a GPU")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median ratio is taken")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    repeats = args.repeats or (10 if device.type == "cuda" else 1)
    trained = source(args.backbone, args.size, device)
    x = torch.rand(args.batch, 3, args.size, args.size, device=device)
    plain = copy.deepcopy(trained.model)

    @torch.no_grad()
    def inference() -> None:
        plain(x)

    rows = []
    for name in METHODS if args.methods == "all" else args.methods.split(","):
        try:
            rows.append(measure(trained, name, x, repeats, args.rounds, inference))
        except VicinalError as error:
            print(f"{name}: left out ({error})")
            continue
        row = rows[-1]
        print(
            f"{name:14} {row['step_ms']:9.2f} ms  {row['times_inference']:6.2f} x inference  "
            f"overhead {row['overhead']:+6.1%}  "
            f"{row['forward_passes']} forward, {row['backward_passes']} backward",
            flush=True,
        )
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    setup = {"backbone": args.backbone, "size": args.size, "batch": args.batch, "device": where}
    result = {
        **setup,
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
        "rows": rows,
        "versions": versions(),
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
