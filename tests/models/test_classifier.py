"""The classifier: plain images in, normalization inside, a head that can be read."""

import torch
from torch import nn
from torchvision.transforms.v2.functional import normalize

from vicinal.models.classifier import Classifier
from vicinal.models.small import small_features

MEAN, STD = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]


def make() -> Classifier:
    torch.manual_seed(0)
    features, width = small_features(3)
    return Classifier(features, width, 5, MEAN, STD).eval()


def test_features_see_normalized_images() -> None:
    model, x = make(), torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(model.embed(x), model.features(normalize(x, MEAN, STD)))


def test_logits_are_the_linear_head_of_the_features() -> None:
    model, x = make(), torch.rand(2, 3, 8, 8)
    z, logits = model.features_and_logits(x)
    assert logits.shape == (2, 5)
    assert torch.equal(z, model.embed(x))
    assert torch.equal(logits, model(x))
    torch.testing.assert_close(logits, z @ model.linear.weight.T + model.linear.bias)


def test_one_pass_serves_both_features_and_logits() -> None:
    model, calls = make(), []
    model.features.register_forward_hook(lambda *_: calls.append(1))
    model.features_and_logits(torch.rand(2, 3, 8, 8))
    assert len(calls) == 1


def test_normalization_travels_with_the_state_and_is_not_trained() -> None:
    model = make()
    names = {name for name, _ in model.named_parameters()}
    assert not {"mean", "std"} & names
    other = Classifier(*small_features(3), 5, [0.0] * 3, [1.0] * 3).eval()
    other.load_state_dict(model.state_dict())
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(model(x), other(x))


def test_normalization_follows_the_model_to_another_precision() -> None:
    model = make().double()
    assert model(torch.rand(2, 3, 8, 8, dtype=torch.float64)).dtype == torch.float64


def test_the_head_is_read_without_a_graph_and_stays_current() -> None:
    model = make()
    head = model.linear
    assert not head.weight.requires_grad
    assert not head.bias.requires_grad
    with torch.no_grad():
        model.head.bias.add_(1)
    assert torch.equal(model.linear.bias, model.head.bias)


def test_gray_images() -> None:
    model = Classifier(nn.Flatten(), 16, 3, [0.5], [0.25])
    x = torch.rand(2, 1, 4, 4)
    torch.testing.assert_close(model.embed(x), (x.flatten(1) - 0.5) / 0.25)
