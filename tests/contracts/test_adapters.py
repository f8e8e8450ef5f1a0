"""What every adapter promises, whatever the method and whatever the net: see `adapters/contract.py`."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vicinal.adapters.contract import Adapter
from vicinal.adapters.guard import Guarded
from vicinal.adapters.methods import METHODS
from vicinal.adapters.statistics import KINDS
from vicinal.checkpoint import Trained
from vicinal.data.augment import Augment

Case = Any  # conftest.Case
NETS = ("small", "small_gn", "small_ln", "small_none", "vit")
STILL = ("bn", "erm", "labels", "lame", "single_sample", "t3a")  # methods that update no parameter
# Methods that draw: labels, views of images, or weights to start from.
DRAWS = (
    "cotta",
    "labels",
    "memo",
    "neighbor",
    "probabilistic",
    "rotta",
    "single_sample",
    "tast",
    "ttt_pp",
    "vnl",
    "vnl_paper",
)


def run(adapter: Adapter, batches: list[Tensor]) -> list[Tensor]:
    return [adapter(batch) for batch in batches]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def portrait(source: Trained, fingerprint: Any) -> list[Any]:
    """Return all that an adapter could have changed in its source."""
    parts = [source.model, source.phi, source.anchor_phi, source.predict_phi]
    modules = [module for part in parts if part is not None for module in part.modules()]
    values = [value for part in parts if part is not None for value in part.parameters()]
    hooks = [
        len(getattr(module, name))
        for module in modules
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    ]
    momenta = [getattr(module, "momentum", None) for module in modules]
    flags = [(value.requires_grad, value.grad is None) for value in values]
    state = [fingerprint(part) for part in parts if part is not None]
    return [state, flags, [module.training for module in modules], hooks, momenta]


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("kind", ["batch", "source"])
def test_the_models_under_test_have_something_to_decide(make_case: Any, net: str, kind: str) -> None:
    """Else every promise below could be kept by luck: all predictions one class, all gradients zero."""
    case = make_case("bn", net)
    p = case.adapt(statistics=kind)(case.images(16)).softmax(-1)
    assert len(p.argmax(-1).unique()) >= 3
    assert 0.3 < float(-(p * p.log()).sum(-1).mean()) < 1.3


def test_logits_are_finite_and_of_the_right_shape(case: Case) -> None:
    adapter = case.adapt()
    for batch in case.stream(6, 6, 5, 1):
        logits = adapter(batch)
        assert logits.shape == (len(batch), 4)
        assert logits.dtype == torch.float32
        assert logits.isfinite().all()
        assert not logits.requires_grad


def test_reset_restores_every_tensor_and_the_next_outputs(case: Case) -> None:
    adapter, batches = case.adapt(), case.stream(6, 5)
    fresh = case.fingerprint(adapter)
    first = run(adapter, batches)
    if case.method != "erm":
        assert case.fingerprint(adapter) != fresh
    for _ in range(2):
        adapter.reset()
        assert case.fingerprint(adapter) == fresh
        assert same(run(adapter, batches), first)


def test_the_source_is_untouched(case: Case) -> None:
    source = case.source()
    # A state that no adapter would leave behind by accident: training mode, one parameter frozen.
    source.model.train()
    source.model.head.bias.requires_grad_(False)
    before = portrait(source, case.fingerprint)
    adapter = case.adapt(source)
    run(adapter, case.stream(6, 1))
    adapter.load_state_dict(adapter.state_dict())
    adapter.reset()
    assert portrait(source, case.fingerprint) == before


def test_no_hook_is_left_and_the_adapter_stays_in_evaluation_mode(case: Case) -> None:
    adapter = case.adapt(statistics="stream")
    run(adapter, case.stream(6, 1))
    for module in adapter.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module.training


def test_a_saved_stream_continues_bit_for_bit(case: Case) -> None:
    adapter, (first, second, *rest) = case.adapt(), case.stream(6, 6, 5, 1)
    run(adapter, [first, second])
    file = io.BytesIO()
    torch.save(adapter.state_dict(), file)
    expected = run(adapter, rest)
    file.seek(0)
    other = case.adapt(seed=5)
    run(other, [case.images(3, seed=77)])
    other.load_state_dict(torch.load(file, weights_only=True))
    assert same(run(other, rest), expected)
    assert case.fingerprint(other) == case.fingerprint(adapter)


def test_a_snapshot_survives_the_steps_of_whoever_loaded_it(case: Case) -> None:
    adapter, batches = case.adapt(), case.stream(6, 5)
    run(adapter, batches)
    snapshot = copy.deepcopy(adapter.state_dict())
    before = case.fingerprint(snapshot)
    other = case.adapt()
    other.load_state_dict(snapshot)
    run(other, batches)
    assert case.fingerprint(snapshot) == before


def test_a_snapshot_survives_the_steps_of_the_adapter_it_was_taken_from(batch_norm_case: Case) -> None:
    if batch_norm_case.method == "erm":
        pytest.skip("a method without state cannot show it")
    adapter, batches = batch_norm_case.adapt(), batch_norm_case.stream(6, 5)
    run(adapter, batches)
    snapshot = adapter.state_dict()
    before = batch_norm_case.fingerprint(snapshot)
    expected = run(adapter, batches)
    assert batch_norm_case.fingerprint(snapshot) == before
    adapter.load_state_dict(snapshot)
    assert same(run(adapter, batches), expected)


def test_the_same_seed_gives_the_same_output_and_no_other_randomness_is_touched(case: Case) -> None:
    batches = case.stream(6, 5)
    first = run(case.adapt(), batches)
    torch.rand(3)
    before = torch.get_rng_state()
    assert same(run(case.adapt(), batches), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(run(case.adapt(seed=1), batches), first) == (case.method not in DRAWS)


def test_no_grad_changes_nothing(case: Case) -> None:
    batches = case.stream(6, 5)
    expected = run(case.adapt(), batches)
    with torch.no_grad():
        adapter = case.adapt()
        assert same(run(adapter, batches), expected)
        adapter.reset()
        assert same(run(adapter, batches), expected)


def test_episodic_is_a_reset_before_every_batch(case: Case) -> None:
    batches = case.stream(6, 6, 5)
    adapter, expected = case.adapt(), []
    for batch in batches:
        adapter.reset()
        expected.append(adapter(batch))
    assert same(run(case.adapt(episodic=True), batches), expected)


def test_an_adapter_stays_in_evaluation_mode(batch_norm_case: Case) -> None:
    source = batch_norm_case.source()
    source.model.features.append(nn.Dropout(0.5))
    asked, left = (batch_norm_case.adapt(source) for _ in range(2))
    for batch in batch_norm_case.stream(6, 1, 5):
        assert torch.equal(asked.train()(batch), left(batch))
    assert not any(module.training for module in asked.modules())


@pytest.mark.parametrize("guard", [False, True])
def test_autocast_around_an_adapter_changes_nothing(batch_norm_case: Case, guard: bool) -> None:
    around, plain = (
        Guarded(adapter) if guard else adapter
        for adapter in (batch_norm_case.adapt(), batch_norm_case.adapt())
    )
    for batch in batch_norm_case.stream(6, 1, 5):
        with torch.autocast("cpu", torch.bfloat16):
            logits = around(batch)
        assert torch.equal(logits, plain(batch))


def test_autocast_around_a_source_that_stands_in_changes_nothing(batch_norm_case: Case) -> None:
    around, plain = (Guarded(batch_norm_case.adapt()) for _ in range(2))
    around.watch.resting = plain.watch.resting = 3
    for batch in batch_norm_case.stream(6, 1, 5):
        with torch.autocast("cpu", torch.bfloat16):
            logits = around(batch)
        assert around.by_source
        assert torch.equal(logits, plain(batch))


def test_weights_that_are_not_numbers_give_logits_that_are_none(batch_norm_case: Case) -> None:
    adapter, (first, *rest) = batch_norm_case.adapt(), batch_norm_case.stream(6, 6, 1)
    for batch in rest:
        adapter.reset()
        adapter(first)
        with torch.no_grad():
            for value in adapter.parameters():
                value.fill_(torch.nan)
        assert adapter(batch).isnan().all()


def test_after_predictions_that_are_no_numbers_a_stream_begins_anew(batch_norm_case: Case) -> None:
    adapter, (first, second) = batch_norm_case.adapt(), batch_norm_case.stream(6, 6)
    adapter(first)
    with torch.no_grad():
        for value in adapter.parameters():
            value.fill_(torch.nan)
    assert adapter(first).isnan().all()
    with pytest.warns(UserWarning, match="not numbers: the adapter went back to its source"):
        found = adapter(second)
    assert torch.equal(found, batch_norm_case.adapt()(second))


def test_two_steps_go_further_than_one(case: Case) -> None:
    batches = case.stream(6, 5)
    once, twice = run(case.adapt(), batches), run(case.adapt(steps=2), batches)
    assert all(logits.isfinite().all() for logits in twice)
    assert same(once, twice) == (case.method in STILL)


def test_a_deep_copy_is_independent(case: Case) -> None:
    adapter, batches = case.adapt(), case.stream(6, 5)
    run(adapter, batches[:1])
    twin, before = copy.deepcopy(adapter), case.fingerprint(adapter)
    from_twin = run(twin, batches)
    assert case.fingerprint(adapter) == before
    assert same(run(adapter, batches), from_twin)
    twin.reset()
    assert same(run(twin, batches), run(case.adapt(), batches))


def test_an_augmented_view_moves_only_the_update(case: Case) -> None:
    batches = case.stream(6, 5)
    plain = run(case.adapt(), batches)
    view = Augment(min_scale=0.5)
    augmented = run(case.adapt(augment=view), batches)
    assert all(logits.isfinite().all() for logits in augmented)
    assert same(augmented, plain) == (case.method in STILL)
    assert same(run(case.adapt(augment=view), batches), augmented)


def test_every_method_says_in_one_line_what_it_does() -> None:
    for name in METHODS:
        assert METHODS[name].summary.endswith(".")
        assert "\n" not in METHODS[name].summary


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_statistics_keeps_the_promises(batch_norm_case: Case, kind: str) -> None:
    adapter, batches = batch_norm_case.adapt(statistics=kind), batch_norm_case.stream(6, 1, 5)
    fresh, first = batch_norm_case.fingerprint(adapter), run(adapter, batches)
    assert adapter.settings.statistics.kind == kind
    assert all(logits.isfinite().all() for logits in first)
    saved = copy.deepcopy(adapter.state_dict())
    expected = run(adapter, batches)
    adapter.reset()
    assert batch_norm_case.fingerprint(adapter) == fresh
    assert same(run(adapter, batches), first)
    adapter.load_state_dict(saved)
    assert same(run(adapter, batches), expected)


def test_kinds_of_statistics_differ_where_there_are_any_and_only_there(case: Case) -> None:
    batches = case.stream(6, 5)
    by_kind = [run(case.adapt(statistics=kind), batches) for kind in KINDS]
    for position, outputs in enumerate(by_kind):
        for other in by_kind[:position]:
            assert same(outputs, other) == (case.net != "small")


@pytest.mark.parametrize("net", NETS)
def test_erm_is_the_plain_model(make_case: Any, net: str) -> None:
    case = make_case("erm", net)
    adapter, plain = case.adapt(), case.source().model.eval()
    for batch in case.stream(6, 5, 1):
        assert torch.equal(adapter(batch), plain(batch).detach())


class Activating(nn.BatchNorm2d):
    """A layer whose class does more than normalize, as many of timm's."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def in_one(source: Trained) -> Trained:
    """Return the model with its activations inside the layers that normalize."""
    folded = copy.deepcopy(source)
    features = folded.model.features
    for index, layer in enumerate(features):
        if isinstance(layer, nn.BatchNorm2d):
            assert isinstance(features[index + 1], nn.ReLU)
            layer.__class__, features[index + 1] = Activating, nn.Identity()
    return folded


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_also_activates_goes_on_doing_so(batch_norm_case: Case, kind: str) -> None:
    source = batch_norm_case.source()
    adapters = [batch_norm_case.adapt(model, statistics=kind) for model in (source, in_one(source))]
    for x in batch_norm_case.stream(6, 1, 5):
        torch.testing.assert_close(*(adapter(x) for adapter in adapters), rtol=0, atol=0)


def test_features_in_half_precision_leave_the_rest_in_single(case: Case) -> None:
    adapter = case.adapt(precision="bfloat16")
    started = adapter.state_dict()
    for x in case.stream(6, 5):
        logits = adapter(x)
        assert logits.dtype == torch.float32
        assert logits.isfinite().all()
    assert {value.dtype for value in adapter.model.parameters()} == {torch.float32}
    adapter.reset()
    assert case.fingerprint(adapter.state_dict()) == case.fingerprint(started)


@pytest.mark.parametrize("net", NETS)
def test_half_precision_is_near_single_where_nothing_is_learned(make_case: Any, net: str) -> None:
    case = make_case("erm", net)
    x = case.images(6)
    half, single = case.adapt(precision="bfloat16")(x), case.adapt()(x)
    assert not torch.equal(half, single)
    torch.testing.assert_close(half, single, rtol=0, atol=0.05 * float(single.std()))
