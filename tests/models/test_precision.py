"""Features in half precision: what comes out of them, and what the weights get, is in single."""

import torch

from vicinal.models.backbones import Preprocessing, build_classifier

PLAIN = Preprocessing(8, 3, (0.5,) * 3, (0.25,) * 3)


def test_features_in_bfloat16_give_features_and_gradients_in_single_precision() -> None:
    torch.manual_seed(0)
    model, x = build_classifier("small", 4, preprocessing=PLAIN), torch.rand(6, 3, 8, 8)
    exact, _ = model.features_and_logits(x)
    model.precision = torch.bfloat16
    z, logits = model.features_and_logits(x)
    assert z.dtype == logits.dtype == torch.float32
    assert not torch.equal(z, exact)
    torch.testing.assert_close(z, exact, rtol=0.05, atol=0.05)
    logits.square().mean().backward()
    assert {value.grad.dtype for value in model.parameters() if value.grad is not None} == {torch.float32}


def test_other_weights_can_be_put_in_without_touching_the_model() -> None:
    torch.manual_seed(0)
    model, x = build_classifier("small", 4, preprocessing=PLAIN).eval(), torch.rand(6, 3, 8, 8)
    state = {name: value.clone() for name, value in model.features.state_dict().items()}
    assert torch.equal(model.embed(x, state), model.embed(x))
    weight = next(name for name, value in state.items() if value.ndim == 4)
    state[weight] = torch.zeros_like(state[weight])
    assert not torch.equal(model.embed(x, state), model.embed(x))
