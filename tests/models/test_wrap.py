"""Classifiers that somebody brings: features and head are found, wrappers taken off, nothing is changed."""

import copy
import math
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.guard import Guarded
from vicinal.adapters.methods import adapt
from vicinal.errors import AdapterError, ConfigError, UnknownNameError
from vicinal.models.wrap import Wrapped, find_head, logits_of, unwrapped

CLASSES = 5


def vit() -> nn.Module:
    sizes = {"image_size": 32, "patch_size": 16, "num_layers": 2, "hidden_dim": 24, "mlp_dim": 32}
    net = torchvision.models.VisionTransformer(**sizes, num_heads=2, num_classes=CLASSES)
    nn.init.normal_(net.heads.head.weight)  # torchvision's start at zero, where nothing has a gradient
    return net


def small_timm(name: str, **options: Any) -> nn.Module:
    return timm.create_model(name, num_classes=CLASSES, **options)


NETS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "torchvision resnet18": (lambda: torchvision.models.resnet18(num_classes=CLASSES), "fc"),
    "torchvision mobilenet": (
        lambda: torchvision.models.mobilenet_v3_small(num_classes=CLASSES, width_mult=0.5),
        "classifier.3",
    ),
    "torchvision vit": (vit, "heads.head"),
    "timm resnet": (lambda: small_timm("resnet10t"), "fc"),
    "timm vit": (
        lambda: small_timm("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=2),
        "head",
    ),
    "timm convnext": (
        lambda: small_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
        "head.fc",
    ),
}


class Own(nn.Module):
    """A net whose layers have names of their own, with dropout between features and head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.drop = nn.Dropout(0.5)
        self.answer = nn.Linear(8, CLASSES)
        self.unused = nn.Linear(8, 2)  # the last of its kind, and not the head

    def forward(self, x: Tensor) -> Any:
        return self.answer(self.drop(self.pool(self.stem(x))))


class ConvHead(nn.Module):
    """A fully convolutional net: no linear layer anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.out = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x)).mean((2, 3))


class Named(Own):
    """A net that returns an object with logits, as those of transformers do."""

    def __init__(self, form: str) -> None:
        super().__init__()
        del self.unused
        self.form = form

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        forms = {
            "object": SimpleNamespace(loss=None, logits=logits),
            "tuple": (logits, x),
            "dict": {"logits": logits},
            "mapping": MappingProxyType({"loss": None, "logits": logits}),
            "nameless": {"out": logits},
        }
        return forms[self.form]


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def images(count: int = 6, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def portrait(net: nn.Module) -> list[Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return [
        [(name, value.clone(), value.dtype) for name, value in net.state_dict().items()],
        [(value.requires_grad, value.grad is None) for value in net.parameters()],
        [(part.training, getattr(part, "momentum", None)) for part in net.modules()],
        [len(getattr(part, name)) for part in net.modules() for name in hooks],
    ]


def same(one: list[Any], other: list[Any]) -> bool:
    tensors = all(torch.equal(a[1], b[1]) and a[2] == b[2] for a, b in zip(one[0], other[0], strict=True))
    return tensors and one[1:] == other[1:]


@pytest.mark.parametrize("name", NETS)
def test_features_and_head_are_found_and_reproduce_the_model(name: str) -> None:
    make, head = NETS[name]
    net = seeded(make).eval()
    wrapped = Wrapped(net)
    assert wrapped.head_name == head
    z, logits = wrapped.features_and_logits(images())
    assert torch.equal(logits, net(images()))
    rows = wrapped.linear
    assert rows.weight.shape == (CLASSES, z.shape[1])
    torch.testing.assert_close(z @ rows.weight.T + rows.bias, logits)
    torch.testing.assert_close(wrapped.head(z), logits)
    assert {id(value) for value in wrapped.head_parameters()} == {
        id(value) for value in net.get_submodule(head).parameters()
    }


@pytest.mark.parametrize("method", ["tent", "t3a"])
@pytest.mark.parametrize("name", NETS)
def test_any_of_them_adapts_in_one_line_and_is_left_as_it_was(name: str, method: str) -> None:
    net = seeded(NETS[name][0]).train()
    before = portrait(net)
    adapter = adapt(net, method, lr=1e-2)
    first = [adapter(images(count, seed)) for seed, count in enumerate((6, 5, 1))]
    assert all(logits.shape == (len(logits), CLASSES) and logits.isfinite().all() for logits in first)
    if method != "t3a":
        assert not torch.equal(first[0], adapter(images()))
    adapter.reset()
    assert torch.equal(adapter(images()), first[0])
    assert same(portrait(net), before)


def test_inplace_means_the_model_itself() -> None:
    net = seeded(Own)
    before = net.answer.weight.clone()
    adapter = adapt(net, "soft", lr=1e-2, inplace=True, head="answer")
    adapter(images())
    assert adapter.model.net is net
    assert not torch.equal(net.answer.weight, before)
    adapter.reset()
    assert torch.equal(net.answer.weight, before)


def test_a_head_by_another_name_is_named() -> None:
    net = seeded(Own).eval()
    wrong = Wrapped(net)
    assert wrong.head_name == "unused"
    with pytest.raises(AdapterError, match="expected at 'unused', found nothing: name another layer"):
        wrong.features_and_logits(images())
    z, logits = Wrapped(net, head="answer").features_and_logits(images())
    torch.testing.assert_close(net.answer(z), logits)
    pooled, _ = Wrapped(net, features="pool", head="answer").features_and_logits(images())
    torch.testing.assert_close(pooled, z)
    with pytest.raises(AdapterError, match=r"features of shape \(N, d\) were expected at 'stem'"):
        Wrapped(net, features="stem").features_and_logits(images())


def test_a_wrong_guess_of_the_head_stops_only_methods_that_need_it() -> None:
    net = seeded(Own)
    assert adapt(net, "tent")(images()).shape == adapt(net, "tent", head="answer")(images()).shape
    for method, options in (("t3a", {}), ("lame", {}), ("soft", {"parameters": "features"})):
        with pytest.raises(AdapterError, match="expected at 'unused', found nothing: name another layer"):
            adapt(net, method, **options)(images())
    with pytest.raises(AdapterError, match="expected at 'unused', found nothing: name another layer"):
        adapt(net, "tent", head="unused")(images())


@pytest.mark.parametrize("method", ["labels", "neighbor", "single_sample", "ttt", "ttt_pp", "vnl_paper"])
@pytest.mark.parametrize(
    "net", [Own(), nn.Sequential(nn.Conv2d(3, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())]
)
def test_methods_that_need_training_say_so_of_a_model_of_ones_own(net: nn.Module, method: str) -> None:
    with pytest.raises(
        AdapterError, match=rf"method '{method}' needs a model trained by vicinal \(.*'tent'\)"
    ):
        adapt(net, method)


def test_vnl_without_a_linear_layer_says_that_it_misses_one() -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(AdapterError, match="needs the model's linear classifier and found none"):
        adapt(net, "vnl")


def test_weights_that_are_not_finite_are_refused() -> None:
    net = Own()
    with torch.no_grad():
        next(net.parameters()).view(-1)[0] = math.nan
    with pytest.raises(AdapterError, match=r"the weights '.*' of this model are not finite"):
        adapt(net, "tent")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_statistics_that_are_not_finite_are_refused(value: float) -> None:
    net = Own()
    net.stem[1].running_var[2] = value
    with pytest.raises(AdapterError, match=r"the weights 'stem.1.running_var' of this model are not finite"):
        adapt(net, "tent")


def test_a_mask_may_hide_places_by_minus_infinity() -> None:
    net = Own()
    net.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    assert adapt(net, "erm", head="answer")(images()).shape == (6, CLASSES)


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("inside", [False, True])
def test_modules_of_torchscript_are_refused(inside: bool) -> None:
    script = torch.jit.trace(Own().eval(), images())
    with pytest.raises(AdapterError, match=r"TorchScript .* pass the nn.Module it was made from"):
        adapt(nn.Sequential(script) if inside else script, "tent")


class Cut(nn.Module):
    """A net whose owner only ever predicts with it."""

    def __init__(self, mode: Callable[[], Any]) -> None:
        super().__init__()
        self.net, self.mode = Own(), mode

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            return self.net(x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", ["tent", "soft", "sar"])
def test_a_forward_without_gradients_is_said_in_one_line(method: str, mode: Callable[[], Any]) -> None:
    net = seeded(lambda: Cut(mode))
    with pytest.raises(AdapterError, match=r"runs without gradients, .* adapt\(model, 'bn'\)") as caught:
        adapt(net, method, head="net.answer")(images())
    assert "\n" not in str(caught.value)
    assert adapt(net, "bn", head="net.answer")(images()).shape == (6, CLASSES)


def test_another_failure_of_a_forward_stays_what_it_is() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(9, CLASSES))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        adapt(net, "tent")(images())


@pytest.mark.parametrize("method", ["tent", "vnl"])
def test_a_model_that_cannot_be_copied_says_what_to_do(method: str) -> None:
    net = seeded(Own)
    with pytest.warns(FutureWarning, match="weight_norm"):
        net.answer = nn.utils.weight_norm(net.answer)  # its weight is computed, and no leaf
    with pytest.raises(
        AdapterError, match=r"cannot be copied \(.*\): .*parametrizations, or .*inplace=True"
    ) as caught:
        adapt(net, method, head="answer")
    assert "\n" not in str(caught.value)
    assert adapt(net, "tent", head="answer", inplace=True)(images()).shape == (6, CLASSES)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize(
    "move", [nn.Module.half, nn.Module.bfloat16, lambda thing: thing.to(dtype=torch.float16)]
)
def test_an_adapter_is_not_turned_to_half_precision(move: Callable[[Any], Any], guard: bool) -> None:
    adapter = adapt(seeded(Own), "tent", head="answer")
    with pytest.raises(AdapterError, match="precision='bfloat16'"):
        move(Guarded(adapter) if guard else adapter)
    assert {value.dtype for value in adapter.parameters()} == {torch.float32}
    assert adapter.to("cpu").double()(images().double()).shape == (6, CLASSES)


def test_what_is_no_model_no_adapter_and_no_batch() -> None:
    with pytest.raises(AdapterError, match=r"expected a model, .* got 'resnet18'"):
        adapt("resnet18", "tent")  # type: ignore[arg-type]
    adapter = adapt(Own(), "tent", head="answer")
    for thing in (adapter, Guarded(adapter)):
        with pytest.raises(AdapterError, match="an adapter already"):
            adapt(thing, "tent")
    with pytest.raises(AdapterError, match=r"as a tensor .* got ndarray"):
        adapter(images().numpy())
    for thing in (Own(), Guarded(adapter)):
        with pytest.raises(AdapterError, match=rf"watches an adapter, .* not {type(thing).__name__}"):
            Guarded(thing)  # type: ignore[arg-type]


def test_names_that_are_not_there_list_those_that_are() -> None:
    for option in ("features", "head"):
        with pytest.raises(UnknownNameError, match=rf"unknown {option} layer 'last': .*\banswer\b"):
            adapt(Own(), "soft", **{option: "last"})


def test_layers_of_a_trained_model_are_not_named(tmp_path: Any) -> None:
    trained = adapt(seeded(Own), "soft", head="answer").source
    with pytest.raises(ConfigError, match="for models of your own"):
        adapt(trained, "soft", head="answer")


def test_a_net_without_a_linear_layer_works_with_what_needs_only_logits() -> None:
    net = seeded(ConvHead).eval()
    wrapped = Wrapped(net)
    z, logits = wrapped.features_and_logits(images())
    assert (z.shape, wrapped.has_features, wrapped.head_parameters()) == ((6, 0), False, [])
    assert torch.equal(logits, net(images()))
    for method in ("erm", "bn", "tent", "soft", "hard", "probabilistic"):
        assert adapt(net, method)(images()).shape == (6, CLASSES)
    for method in ("t3a", "lame"):
        with pytest.raises(AdapterError, match=r"name (its|their) \S+.*as in adapt\(model, ") as caught:
            adapt(net, method)(images())
        assert "\n" not in str(caught.value)


def test_a_head_that_is_no_linear_layer_can_be_named_for_its_features() -> None:
    class Pooled(ConvHead):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.body(x).mean((2, 3), keepdim=True)).flatten(1)

    net = seeded(Pooled).eval()
    with pytest.raises(AdapterError, match=r"found \(6, 8, 1, 1\)"):
        Wrapped(net, head="out").features_and_logits(images())
    assert len(Wrapped(net, head="out").head_parameters()) == 2


@pytest.mark.parametrize("form", ["object", "tuple", "dict", "mapping"])
def test_logits_are_found_in_what_a_model_returns(form: str) -> None:
    net = seeded(lambda: Named(form)).eval()
    expected = Own.forward(net, images())
    assert torch.equal(adapt(net, "erm")(images()), expected.detach())
    assert adapt(net, "soft")(images()).shape == (6, CLASSES)


def test_an_output_that_holds_no_logits_is_refused() -> None:
    with pytest.raises(AdapterError, match=r"must return logits \(N, C\), it returned dict"):
        adapt(seeded(lambda: Named("nameless")), "erm")(images())
    with pytest.raises(AdapterError, match=r"it returned \(2, 3, 4\)"):
        logits_of(torch.zeros(2, 3, 4))
    with pytest.raises(AdapterError, match="it returned tuple"):
        logits_of(())


def test_wrappers_are_taken_off() -> None:
    net = seeded(Own).eval()
    compiled = torch.compile(net, backend="eager")
    assert all(unwrapped(outer) is net for outer in (net, nn.DataParallel(net), compiled))
    assert unwrapped(nn.DataParallel(compiled)) is net
    expected = adapt(net, "soft", head="answer")(images())
    for outer in (nn.DataParallel(net), compiled, nn.DataParallel(compiled)):
        assert torch.equal(adapt(outer, "soft", head="answer")(images()), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_adapts_in_full_and_answers_in_its_own(dtype: torch.dtype) -> None:
    net = seeded(NETS["torchvision resnet18"][0]).to(dtype)
    before = portrait(net)
    adapter = adapt(net, "tent", lr=1e-4)
    logits = adapter(images().to(dtype))
    assert logits.dtype == dtype
    assert next(adapter.model.parameters()).dtype == torch.float32
    # A step this small is lost in the rounding of the weights' own precision.
    moved = (adapter.model.net.bn1.weight - net.bn1.weight.float()).detach()
    assert 0 < float(moved.abs().max()) < 2e-4
    assert same(portrait(net), before)
    exact = adapt(copy.deepcopy(net).float(), "tent", lr=1e-4)(images().to(dtype).float())
    torch.testing.assert_close(logits, exact.to(dtype))


def test_a_model_in_double_precision_stays_so() -> None:
    assert adapt(seeded(Own).double(), "soft", head="answer")(images()).dtype == torch.float64


def test_models_that_cannot_adapt_are_refused() -> None:
    with pytest.raises(AdapterError, match="no parameters: there is nothing to adapt"):
        adapt(nn.Flatten(), "soft")
    plain = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, CLASSES))
    with pytest.raises(AdapterError, match="no parameters of kind 'norm'"):
        adapt(plain, "tent")
    assert adapt(plain, "tent", parameters="all")(images()).shape == (6, CLASSES)


def test_channels_are_those_of_the_first_convolution_where_there_is_one() -> None:
    assert Wrapped(Own()).channels == 3
    assert Wrapped(nn.Sequential(nn.Flatten(), nn.Linear(12, 2))).channels is None
    with pytest.raises(AdapterError, match=r"\(N >= 1, 3, H, W\), got \(6, 1, 32, 32\)"):
        adapt(seeded(Own), "erm")(images()[:, :1])


def test_usual_names_come_before_the_last_linear_layer() -> None:
    net = nn.ModuleDict(
        {"classifier": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)), "other": nn.Linear(4, 9)}
    )
    assert find_head(net) == "classifier.1"
    assert find_head(nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 4)})) == "b"
    assert find_head(nn.Linear(2, 3)) == ""
    assert find_head(nn.ReLU()) is None
