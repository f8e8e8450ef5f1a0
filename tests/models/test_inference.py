"""The two inference nets: what they give before any fitting, which classes they move, and by how much."""

import math

import pytest
import timm
import torch
from torch import Tensor

from vicinal.functional.labels import class_means, linear_logits, neighbor_labels
from vicinal.functional.memory import EVIDENCE, centres, empty_memory, evidence, source_rows
from vicinal.models.inference import InferenceNet, StreamInferenceNet
from vicinal.types import GaussianW, Head, StreamMemory

C, D, N = 4, 6, 9


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def head_of(seed: int = 1, *leading: int) -> Head:
    return Head(draw(*leading, C, D, seed=seed), draw(*leading, C, seed=seed + 1))


def awake(net: torch.nn.Module, seed: int = 5) -> torch.nn.Module:
    """Return the net with every parameter random, as a fitted one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in net.parameters():
            value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    return net


def same(first: tuple[Tensor, ...], second: tuple[Tensor, ...], **tolerance: float) -> None:
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


# The paper's phi


def size_of(net: torch.nn.Module) -> int:
    return sum(value.numel() for value in net.parameters())


def test_the_paper_s_parameter_count_with_a_resnet18() -> None:
    with torch.device("meta"):
        features, phi = timm.create_model("resnet18", num_classes=0), InferenceNet(512)
    assert round(size_of(features) / 1e6, 2) == 11.18
    assert round((size_of(features) + size_of(phi)) / 1e6, 2) == 11.96


@pytest.mark.parametrize(("layers", "hidden"), [(2, 0), (3, 1), (4, 2)])
def test_layers_of_phi_are_its_linear_maps_heads_included(layers: int, hidden: int) -> None:
    width, inner = D, 7
    net = awake(InferenceNet(width, hidden=inner, layers=layers))
    assert sum(isinstance(part, torch.nn.Linear) for part in net.modules()) == layers
    last = inner if hidden else width
    trunk = (width + 1) * inner * (hidden > 0) + (inner + 1) * inner * max(hidden - 1, 0)
    assert size_of(net) == trunk + 2 * (last + 1) * width
    w = net(draw(C, width), head_of(), torch.ones(C, dtype=torch.bool))
    assert w.mean.shape == w.std.shape == (C, width)
    again = InferenceNet(**net.shape)  # type: ignore[arg-type]
    assert [tuple(p.shape) for p in again.parameters()] == [tuple(p.shape) for p in net.parameters()]


def test_at_the_start_the_labels_of_the_mean_are_the_own_prediction() -> None:
    z, head = draw(N, D), head_of()
    own = linear_logits(z, head.weight, head.bias).softmax(-1)
    w = InferenceNet(D)(*_means(z, own, head))
    assert torch.equal(w.mean, head.weight)
    assert torch.equal(neighbor_labels(z, w, 0), own)


def _means(z: Tensor, y: Tensor, head: Head) -> tuple[Tensor, Head, Tensor]:
    means, present = class_means(z, y)
    return means, head, present


@pytest.mark.parametrize(
    ("width", "given", "expected"), [(2048, None, 5e-3), (512, None, 1e-2), (512, 0.08, 0.08)]
)
def test_the_spread_at_the_start(width: int, given: float | None, expected: float) -> None:
    net = InferenceNet(width, hidden=8, initial_std=given)
    w = net(draw(C, width), Head(draw(C, width), draw(C)), torch.ones(C, dtype=torch.bool))
    torch.testing.assert_close(w.std, torch.full((C, width), expected))


def test_an_absent_class_keeps_its_source_row_and_the_others_move() -> None:
    net, head = awake(InferenceNet(D)), head_of()
    present = torch.tensor([True, False, True, False])
    w = net(draw(C, D), head, present)
    moved = (w.mean - head.weight).abs().amax(-1) > 1e-3
    assert torch.equal(moved, present)
    assert torch.equal(w.mean[~present], head.weight[~present])
    assert (w.std > 0).all()
    assert torch.equal(w.bias, head.bias)


def test_nobody_is_present_and_nothing_breaks() -> None:
    head = head_of()
    w = awake(InferenceNet(D))(torch.zeros(C, D), head, torch.zeros(C, dtype=torch.bool))
    assert torch.equal(w.mean, head.weight)
    assert w.std.isfinite().all()


def test_each_class_is_inferred_from_its_own_mean_alone() -> None:
    net, head, means = awake(InferenceNet(D)), head_of(), draw(C, D)
    present = torch.ones(C, dtype=torch.bool)
    other = means.clone()
    other[2] += 1
    changed = (net(means, head, present).mean - net(other, head, present).mean).abs().amax(-1) > 1e-6
    assert changed.tolist() == [False, False, True, False]


@pytest.mark.parametrize("shared", [True, False])
def test_the_paper_s_phi_with_leading_dimensions_equals_a_loop(shared: bool) -> None:
    net = awake(InferenceNet(D))
    means, present = draw(3, C, D), draw(3, C, seed=9) > 0
    heads = head_of() if shared else head_of(1, 3)
    together = net(means, heads, present)
    for index in range(3):
        head = heads if shared else Head(heads.weight[index], heads.bias[index])
        alone = net(means[index], head, present[index])
        same(tuple(part[index] for part in together), tuple(alone))


def test_gradients_of_the_labels_reach_every_part_of_phi() -> None:
    net, z, head = awake(InferenceNet(D)), draw(N, D), head_of()
    own = linear_logits(z, head.weight, head.bias).softmax(-1)
    w = net(*_means(z, own, head))
    neighbor_labels(z, w, 8, torch.Generator().manual_seed(0)).square().sum().backward()
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in net.parameters())


def test_a_class_nobody_has_gives_no_nan_gradients() -> None:
    net, z, head = awake(InferenceNet(D)), draw(N, D), head_of()
    w = net(*_means(z, torch.eye(C)[torch.zeros(N, dtype=torch.long)], head))
    neighbor_labels(z, w, 0).square().sum().backward()
    assert all(value.grad is None or value.grad.isfinite().all() for value in net.parameters())


# The out-of-fold phi


def batch(seed: int = 0, *leading: int, count: int = N) -> tuple[Tensor, Tensor, Head]:
    z, head = draw(*leading, count, D, seed=seed), head_of()
    return z, linear_logits(z, head.weight, head.bias), head


@pytest.mark.parametrize("count", [1, N])
def test_at_the_start_the_stream_net_gives_exactly_the_own_prediction(count: int) -> None:
    z, logits, head = batch(count=count)
    net, memory = StreamInferenceNet(), empty_memory(head)
    for _ in range(3):
        w, memory = net(z, logits, head, memory)
        assert torch.equal(w.mean, head.weight)
        assert torch.equal(w.bias, head.bias)
        assert torch.equal(neighbor_labels(z, w, 0), logits.softmax(-1))


def test_the_spread_of_the_stream_net_at_the_start() -> None:
    z, logits, head = batch()
    w, _ = StreamInferenceNet()(z, logits, head, empty_memory(head))
    expected = math.exp(-3) * head.weight.norm(dim=1).mean() / math.sqrt(D)
    torch.testing.assert_close(w.std, expected.expand(C, D))


def reference(net: StreamInferenceNet, memory: StreamMemory, head: Head) -> GaussianW:
    """Return w from the formula in the docstring, one class at a time."""
    means = [memory.sums[c] / memory.counts[c] for c in range(C)]
    m = memory.sums.sum(0) / memory.counts.sum()
    centred = [mean - m for mean in means]
    average = sum(value.norm() for value in centred) / C
    r = sum(row.norm() for row in head.weight) / C
    t = net.log_temperature.exp()
    rows, biases, spreads = [], [], []
    for c, numbers in enumerate(evidence(memory, centres(memory), source_rows(head))):
        a, beta, log_s = net.net((numbers - net.location) / net.scale)
        u = centred[c] / average
        rows.append((head.weight[c] + a * r * u) / t)
        gamma = net.marginal_weight * torch.log(memory.marginal[c] + 1e-3)
        biases.append((head.bias[c] + beta + gamma - a * r * (u @ m)) / t)
        spreads.append((log_s.exp() * r / math.sqrt(D) / t).expand(D))
    return GaussianW(torch.stack(rows), torch.stack(spreads), torch.stack(biases))


def test_the_stream_net_agrees_with_its_formula() -> None:
    z, logits, head = batch()
    net = awake(StreamInferenceNet())
    net.location.copy_(draw(len(EVIDENCE), seed=3))
    net.scale.copy_(draw(len(EVIDENCE), seed=4).abs() + 0.5)
    memory = net.step_memory(empty_memory(head), z, logits.softmax(-1))
    same(tuple(net.infer(memory, head)), tuple(reference(net, memory, head)), rtol=1e-4, atol=1e-5)


def test_a_moved_row_acts_on_centred_features() -> None:
    # With a step and nothing else, the logit of a sample at the stream's mean is the source's.
    z, logits, head = batch()
    net = StreamInferenceNet()
    with torch.no_grad():
        net.net[-1].bias[0] = 0.7
    memory = net.step_memory(empty_memory(head), z, logits.softmax(-1))
    w = net.infer(memory, head)
    middle = (memory.sums.sum(0) / memory.counts.sum()).unsqueeze(0)
    assert (w.mean - head.weight).abs().max() > 0.1
    torch.testing.assert_close(
        linear_logits(middle, w.mean, w.bias), linear_logits(middle, head.weight, head.bias)
    )


@pytest.mark.parametrize("shared", [True, False])
def test_the_stream_net_with_leading_dimensions_equals_a_loop(shared: bool) -> None:
    net, z = awake(StreamInferenceNet()).double(), draw(3, N, D).double()
    heads = Head(*(value.double() for value in (head_of() if shared else head_of(1, 3))))
    logits = linear_logits(z, heads.weight, heads.bias)
    memory = empty_memory(heads)
    for step in range(2):
        w, memory = net(z + step, logits, heads, memory)
    for index in range(3):
        head = heads if shared else Head(heads.weight[index], heads.bias[index])
        seen = empty_memory(head)
        for step in range(2):
            alone, seen = net(z[index] + step, logits[index], head, seen)
        same(tuple(part[index] for part in w), tuple(alone), rtol=1e-9, atol=1e-9)
        same(tuple(part[index] for part in memory), tuple(seen), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_the_scale_of_the_features_changes_neither_evidence_nor_labels(scale: float) -> None:
    z, logits, head = batch()
    net = awake(StreamInferenceNet())
    scaled = Head(head.weight / scale, head.bias)
    w, memory = net(z, logits, head, empty_memory(head))
    other, seen = net(scale * z, logits, scaled, empty_memory(scaled))
    torch.testing.assert_close(
        evidence(memory, centres(memory), source_rows(head)),
        evidence(seen, centres(seen), source_rows(scaled)),
        rtol=1e-3,
        atol=1e-4,
    )
    assert not torch.allclose(neighbor_labels(z, w, 0), logits.softmax(-1), atol=1e-2)
    torch.testing.assert_close(
        neighbor_labels(scale * z, other, 0), neighbor_labels(z, w, 0), rtol=1e-3, atol=1e-4
    )


def test_memory_fades_by_images_not_by_batches() -> None:
    z, logits, head = batch(count=20)
    y = logits.softmax(-1)
    net, start = StreamInferenceNet(decay=0.5, reference_batch=20), empty_memory(head)
    once = net.step_memory(net.step_memory(start, z, y), z, y)
    torch.testing.assert_close(once.counts, 1.5 * y.square().sum(0))
    blank = torch.zeros(10, C)
    faded = net.step_memory(net.step_memory(net.step_memory(start, z, y), z[:10], blank), z[:10], blank)
    torch.testing.assert_close(faded.counts, 0.5 * y.square().sum(0))


def test_memory_is_returned_and_the_given_one_untouched() -> None:
    z, logits, head = batch()
    memory = empty_memory(head)
    _, after = awake(StreamInferenceNet())(z, logits, head, memory)
    assert memory.counts.sum() == 0
    assert after.counts.sum() > 0
    torch.testing.assert_close(after.marginal.sum(), torch.tensor(1.0))


def test_the_last_labels_are_what_is_remembered() -> None:
    z, logits, head = batch()
    net, start = awake(StreamInferenceNet(rounds=1)), empty_memory(head)
    w, after = net(z, logits, head, start)
    same(tuple(w), tuple(net.infer(net.step_memory(start, z, logits.softmax(-1)), head)))
    same(tuple(after), tuple(net.step_memory(start, z, neighbor_labels(z, w, 0))))


def test_one_class_alone_and_one_image_alone_stay_finite() -> None:
    net, head = awake(StreamInferenceNet()), head_of()
    one_class = 1e3 * torch.eye(C)[torch.zeros(N, dtype=torch.long)]
    for z, logits in ((draw(N, D), one_class), (draw(1, D), draw(1, C)), (torch.zeros(N, D), draw(N, C))):
        w, memory = net(z, logits, head, empty_memory(head))
        assert all(part.isfinite().all() for part in (*w, *memory))


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_one_image_alone_moves_no_row(scale: float) -> None:
    # All class means of one image are that image: what is left after centring is rounding, not a direction.
    wide = 512
    z, head = scale * draw(1, wide).abs(), Head(draw(C, wide, seed=1) / 20, draw(C, seed=2))
    net = StreamInferenceNet()
    with torch.no_grad():
        net.net[-1].bias[0] = 0.7
    w = net.infer(net.step_memory(empty_memory(head), z, draw(1, C, seed=3).softmax(-1)), head)
    assert (w.mean - head.weight).norm() < 0.01 * head.weight.norm()


def test_a_fresh_net_trusts_everything_and_a_fitted_one_what_it_has_seen() -> None:
    z, logits, head = batch()
    net = StreamInferenceNet()
    memory = net.step_memory(empty_memory(head), z, logits.softmax(-1))
    assert torch.equal(net.trust(memory, head), torch.ones(C))
    numbers = evidence(memory, centres(memory), source_rows(head))
    net.low.copy_(numbers.amin(0))
    net.high.copy_(numbers.amax(0))
    assert torch.equal(net.trust(memory, head), torch.ones(C))
    net.scale.fill_(2)
    net.high[2] = numbers[:, 2].amin() - 1  # every class is now beyond the fitted confidence
    excess = numbers[:, 2] - net.high[2]
    net.low.fill_(-math.inf)
    torch.testing.assert_close(net.trust(memory, head), torch.exp(-excess / 2))


@pytest.mark.parametrize("kind", [InferenceNet, StreamInferenceNet])
def test_the_shape_rebuilds_the_net(kind: type[InferenceNet] | type[StreamInferenceNet]) -> None:
    net = InferenceNet(D, 8, 0.02) if kind is InferenceNet else StreamInferenceNet(7, 3, 0.8, 16)
    again = kind(**net.shape)
    again.load_state_dict(awake(net).state_dict())
    assert again.shape == net.shape
