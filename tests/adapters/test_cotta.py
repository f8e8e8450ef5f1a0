"""CoTTA against the paper and its constants written out again, with loops over views and weights."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import vicinal.adapters.cotta  # noqa: F401  registers the method
from vicinal.adapters.methods import adapt
from vicinal.data.augment import Augment
from vicinal.data.augmix import AugMix
from vicinal.errors import ConfigError

CLOSE = {"rtol": 1e-8, "atol": 1e-8}
VIEW = Augment(0.81, 1.0, flip=True, brightness=0.4, contrast=0.3, saturation=0.5, hue=0.06)
AUTHORS = {"lr": 1e-3, "views": 32, "threshold": 0.92, "alpha": 0.999, "restore": 0.01, "augment": VIEW}


class SlowCotta:
    def __init__(self, source: Any, on_batch: bool = True, **told: Any) -> None:
        self.told = AUTHORS | told
        self.student, self.teacher, self.source = (
            copy.deepcopy(source.model).train(on_batch) for _ in range(3)
        )
        self.rule = torch.optim.Adam(self.student.parameters(), lr=self.told["lr"])
        self.generator = torch.Generator().manual_seed(0)
        self.averaged: list[bool] = []

    def view(self, x: Tensor) -> Tensor:
        """Return each image under the same draw."""
        drawn = self.told["augment"].draw(1, 8, 8, self.generator)
        return torch.cat([self.told["augment"].apply(x[i : i + 1], drawn) for i in range(len(x))]).double()

    def step(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            confidence = self.source(x).softmax(1).max(1).values.mean()
            labels = self.teacher(x)
            self.averaged.append(bool(confidence < self.told["threshold"]))
            if self.averaged[-1]:
                labels = sum(self.teacher(self.view(x)) for _ in range(self.told["views"]))
                labels = labels / self.told["views"]
        p = self.student(x).softmax(1)
        self.rule.zero_grad()
        (-(labels.softmax(1) * p.log()).sum(1).mean()).backward()
        self.rule.step()
        alpha = self.told["alpha"]
        with torch.no_grad():
            for slow, now in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.copy_(alpha * slow + (1 - alpha) * now)
            self.bring_back()
        return labels

    def bring_back(self) -> None:
        count = sum(now.numel() for now in self.student.parameters())
        chance = torch.rand(count, generator=self.generator).tolist()
        for now, then in zip(self.student.parameters(), self.source.parameters(), strict=True):
            mine, first = now.view(-1), then.view(-1)
            for place in range(now.numel()):
                if chance.pop(0) < self.told["restore"]:
                    mine[place] = first[place]


def agree(adapter: Any, slow: SlowCotta) -> None:
    for found, expected in ((adapter.model, slow.student), (adapter.teacher.model, slow.teacher)):
        for a, b in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, **CLOSE)


def test_the_defaults_agree_with_the_slow_reference(make_source: Any, images: Any) -> None:
    source = make_source()
    adapter, slow = adapt(source, "cotta"), SlowCotta(source)
    for seed, count in enumerate((7, 5, 6)):
        x = images(count, seed)
        torch.testing.assert_close(adapter(x), slow.step(x), **CLOSE)
    agree(adapter, slow)
    assert all(slow.averaged)


@pytest.mark.parametrize("kind", ["batch", "source"])
@pytest.mark.parametrize("augment", [Augment(min_scale=0.5), AugMix()], ids=["crop", "augmix"])
def test_other_settings_agree(make_source: Any, images: Any, kind: str, augment: Any) -> None:
    source = make_source()
    told = {"lr": 1e-2, "views": 3, "restore": 0.3, "augment": augment}
    adapter = adapt(source, "cotta", statistics=kind, teacher_weight=0.8, **told)
    slow = SlowCotta(source, kind == "batch", alpha=0.8, **told)
    for seed in range(3):
        torch.testing.assert_close(adapter(images(6, seed)), slow.step(images(6, seed)), **CLOSE)
    agree(adapter, slow)


def test_the_threshold_decides_by_the_source_between_one_view_and_many(make_source: Any, images: Any) -> None:
    source = make_source()
    batches = [images(6, seed) for seed in range(4)]
    sure = sorted(
        float(copy.deepcopy(source.model).train()(x).detach().softmax(1).amax(1).mean()) for x in batches
    )
    middle = (sure[1] + sure[2]) / 2
    adapter = adapt(source, "cotta", views=3, threshold=middle)
    slow = SlowCotta(source, views=3, threshold=middle)
    for x in batches:
        torch.testing.assert_close(adapter(x), slow.step(x), **CLOSE)
    assert sorted(slow.averaged) == [False, False, True, True]


def test_two_steps_a_batch_and_the_teacher_after_them(make_source: Any, images: Any) -> None:
    source, x = make_source(), images(6)
    told = {"views": 2, "steps": 2}
    before, after = adapt(source, "cotta", **told), adapt(source, "cotta", predict="own", **told)
    slow = SlowCotta(source, views=2)
    slow.step(x)
    torch.testing.assert_close(before(x), slow.step(x), **CLOSE)
    torch.testing.assert_close(after(x), slow.teacher(x).detach(), **CLOSE)


@pytest.mark.parametrize("kind", ["blend", "stream"])
def test_on_an_average_all_three_models_see_its_values(
    make_source: Any, images: Any, slow_stream: Any, kind: str
) -> None:
    source = make_source()
    adapter = adapt(source, "cotta", statistics=kind, teacher_weight=0.8, views=3)
    slow = SlowCotta(source, alpha=0.8, views=3)
    averaged = [slow_stream(source, forgets=kind == "blend") for _ in range(3)]
    slow.student, slow.teacher, slow.source = (part.model for part in averaged)
    slow.rule = torch.optim.Adam(slow.student.parameters(), lr=AUTHORS["lr"])
    for seed, count in enumerate((7, 5, 6)):
        x = images(count, seed)
        joined = []
        for part in averaged:
            part.predict(x)
            joined.append([layer.seen for layer in part.layers])
            part.run(x, takes=False)  # from here on: values of the average, gradient of the batch
        teacher = copy.deepcopy(averaged[1])
        slow.step(x)
        expected = teacher.run(x, takes=False)[1].detach()
        torch.testing.assert_close(adapter(x), expected, rtol=1e-6, atol=1e-6)  # sums in another order
        if kind == "stream":
            for part, pairs in zip(averaged[:2], joined, strict=False):  # the source does not move
                part.carry(x, pairs)
                part.run(x, takes=False)
    agree(adapter, slow)


def test_restoring_everything_leaves_the_source_and_restoring_nothing_draws_on(
    make_source: Any, images: Any
) -> None:
    source, x = make_source(), images(6)
    adapter = adapt(source, "cotta", restore=1.0, views=2, lr=1e-2)
    adapter(x)
    for found, expected in zip(adapter.model.parameters(), source.model.parameters(), strict=True):
        assert torch.equal(found, expected)
    kept = adapt(source, "cotta", restore=0.0, views=2, lr=1e-2)
    kept(x)
    assert all(
        (a != b).any() for a, b in zip(kept.model.parameters(), source.model.parameters(), strict=True)
    )


def test_without_augmentation_labels_are_the_clean_ones(make_source: Any, images: Any) -> None:
    source, x = make_source(), images(6)
    expected = copy.deepcopy(source.model).train()(x).detach()
    torch.testing.assert_close(adapt(source, "cotta", augment=None)(x), expected, **CLOSE)


@pytest.mark.parametrize("wrong", [{"teacher_weight": 1.1}, {"restore": -0.1}, {"views": 0}])
def test_settings_out_of_range_are_refused(make_source: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cotta needs"):
        adapt(make_source(), "cotta", **wrong)
