import torch
from torch import Tensor

from vicinal.functional.inference import posterior, prior
from vicinal.functional.labels import hard_labels
from vicinal.types import GaussianW, Head

CLASSES, FEATURES = 4, 3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


HEAD = Head(normal(CLASSES, FEATURES, seed=8), normal(CLASSES, seed=9))


def transparent(means: Tensor, head: Head, present: Tensor) -> GaussianW:
    """A phi whose Gaussian shows what it was given: rows plus means, presence as spread, the bias kept."""
    return GaussianW(head.weight + means, present.unsqueeze(-1).expand_as(means).to(means.dtype), head.bias)


def test_prior_and_posterior_hand_phi_class_means_under_their_own_labels() -> None:
    z = normal(6, FEATURES)
    classes = {"prior": [0, 0, 3, 3, 3, 1], "posterior": [2, 2, 2, 0, 0, 0]}
    for name, infer in (("prior", prior), ("posterior", posterior)):
        labels = torch.tensor(classes[name])
        w = infer(transparent, z, torch.eye(CLASSES, dtype=torch.float64)[labels], HEAD)
        for c in range(CLASSES):
            members = [z[i] for i in range(6) if classes[name][i] == c]
            mean = torch.stack(members).mean(0) if members else torch.zeros(FEATURES).double()
            torch.testing.assert_close(w.mean[c], HEAD.weight[c] + mean)
            assert w.std[c].tolist() == [float(bool(members))] * FEATURES
        assert torch.equal(w.bias, HEAD.bias)


def test_soft_predictions_weigh_every_sample() -> None:
    z, y = normal(6, FEATURES), normal(6, CLASSES, seed=1).softmax(-1)
    w = prior(transparent, z, y, HEAD)
    for c in range(CLASSES):
        mean = sum(float(y[i, c]) * z[i] for i in range(6)) / float(y[:, c].sum())
        torch.testing.assert_close(w.mean[c], HEAD.weight[c] + mean)


def test_prior_and_posterior_are_one_where_the_predictions_are_right() -> None:
    z, logits = normal(6, FEATURES), normal(6, CLASSES, seed=1)
    for p, q in zip(
        *(infer(transparent, z, hard_labels(logits), HEAD) for infer in (prior, posterior)), strict=True
    ):
        assert torch.equal(p, q)


def test_gradients_reach_the_features() -> None:
    z = normal(5, FEATURES).requires_grad_()
    y = normal(5, CLASSES, seed=1).softmax(-1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: prior(transparent, a, b, HEAD).mean, (z, y))
