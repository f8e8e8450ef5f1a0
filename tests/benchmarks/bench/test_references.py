"""Meta-learning by autograd alone does the same work as vicinal's iteration."""

from dataclasses import replace

import pytest
import torch

from vicinal.benchmarks.bench.cases import episode_batches, model_spec, train_config, training_step
from vicinal.benchmarks.bench.floor import counting
from vicinal.benchmarks.bench.references import WithFeatures, laid_out, unrolled_gradients, unrolled_step
from vicinal.benchmarks.bench.scale import Shape
from vicinal.benchmarks.bench.timing import Work
from vicinal.training.config import TrainConfig
from vicinal.training.learner import ALGORITHMS
from vicinal.training.meta import MetaGradients, meta_generalization_step, meta_gradients
from vicinal.training.train import untrained

CPU = torch.device("cpu")
SHAPE = Shape("small", 8, 6, 6, classes=3)


def both(exact: bool) -> tuple[MetaGradients, MetaGradients]:
    """Return vicinal's gradients and autograd's, of one split, in double precision."""
    config: TrainConfig = replace(
        train_config(SHAPE), second_order=exact, adapt_lr=0.5, difference=1e-5, num_samples=2, group_size=4
    )
    model, phi = (net.double() for net in untrained(model_spec(SHAPE), config, CPU))
    model.train()
    x, y = episode_batches(ALGORITHMS["meta"][0], SHAPE, CPU)[1]
    noise = [torch.Generator().manual_seed(3) for _ in range(2)]
    stage = meta_generalization_step(model, phi, x.double(), y, config, noise[0])
    ours, _ = meta_gradients(model, phi, stage, x.double(), y, config)
    theirs = unrolled_gradients(WithFeatures(model), phi, x.double(), y, config, noise[1], exact=exact)
    return ours, theirs


@pytest.mark.parametrize("exact", [False, True])
def test_unrolled_gradients_are_vicinals(exact: bool) -> None:
    ours, theirs = both(exact)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-7, msg=name)


def test_the_second_order_is_not_negligible_there() -> None:
    (_, first), (_, exact) = both(False), both(True)
    change = [(first.theta[name] - value).norm() / value.norm() for name, value in exact.theta.items()]
    assert max(change) > 0.01


def flops(work: Work) -> int:
    with counting() as count:
        work()
    return count.flops


def test_it_does_as_much_arithmetic() -> None:
    assert flops(unrolled_step(SHAPE, CPU, False, False)) == flops(training_step("meta", SHAPE, CPU))


def test_half_precision_is_really_used() -> None:
    for half, dtype in ((False, "float32"), (True, "bfloat16")):
        work = unrolled_step(SHAPE, CPU, False, half)
        with counting() as count:
            work()
        assert count.dtype == dtype


def test_an_unrolled_pass_leaves_the_nets_statistics_alone() -> None:
    config = train_config(SHAPE)
    classifier, phi = untrained(model_spec(SHAPE), config, CPU)
    model = WithFeatures(classifier).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = episode_batches(ALGORITHMS["meta"][0], SHAPE, CPU)[1]
    unrolled_gradients(model, phi, x, y, config, torch.Generator().manual_seed(0), exact=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_gradients_take_the_layout_of_their_parameters() -> None:
    parameter = torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    gradient = torch.arange(48.0).view(4, 3, 2, 2)
    found = laid_out(gradient, parameter)
    assert found.stride() == parameter.stride() != gradient.stride()
    assert torch.equal(found, gradient)
    assert laid_out(found, parameter) is found
