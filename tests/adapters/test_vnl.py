"""vnl against a slow reference: loops over classes and draws, torch.optim.Adam, statistics recomputed."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, relu

from vicinal.adapters.methods import adapt
from vicinal.adapters.vnl_settings import VnlSettings
from vicinal.errors import AdapterError, ConfigError

LR, SEED, DRAWS = 1e-3, 3, 3
HORIZON, MARGINAL_WEIGHT = 1000, 3.0  # the defaults
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class SlowLabeler:
    """The out-of-fold phi on one stream, class by class, from the docstrings' formulas."""

    def __init__(self, phi: Any, generator: torch.Generator, draws: int) -> None:
        self.phi, self.generator, self.draws = phi, generator, draws
        self.sums = self.counts = self.mass = self.marginal = self.squares = None

    def memory_after(self, z: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Return sums, counts, mass, marginal and squares with the batch in, older ones faded by its size."""
        classes = y.shape[1]
        sums = torch.stack([sum(y[i, c] ** 2 * z[i] for i in range(len(z))) for c in range(classes)])
        counts, mass, share = (y**2).sum(0), y.sum(0), y.mean(0)
        squares = torch.stack(
            [sum(y[i, c] ** 2 * (z[i] @ z[i]) for i in range(len(z))) for c in range(classes)]
        )
        fade = 0.9 ** (len(z) / 20)
        if self.sums is None:
            return sums, counts, mass, fade / classes + (1 - fade) * share, squares
        old = [fade * part for part in (self.sums, self.counts, self.mass, self.marginal, self.squares)]
        return old[0] + sums, old[1] + counts, old[2] + mass, old[3] + (1 - fade) * share, old[4] + squares

    def evidence(self, memory: tuple[Tensor, ...], rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the numbers of every class, the centred class means and the stream's mean."""
        sums, counts, mass, marginal, squares = memory
        mean = sums.sum(0) / counts.sum()
        centred = [sums[c] / counts[c] - mean for c in range(len(counts))]
        average = sum(v.norm() for v in centred) / len(centred)
        heads = [row - rows.mean(0) for row in rows]
        head_average = sum(v.norm() for v in heads) / len(heads)
        overall = squares.sum() / counts.sum() - mean.norm() ** 2
        spread = [
            (squares[c] / counts[c] - (sums[c] / counts[c]).norm() ** 2) / overall
            if counts[c] > 1e-3
            else torch.ones_like(overall)  # a class that is hardly there
            for c in range(len(counts))
        ]
        numbers = [
            torch.stack(
                [
                    (counts[c] + 1e-6).log().clamp_min(-5),
                    centred[c] @ heads[c] / (centred[c].norm() * heads[c].norm()),
                    counts[c] / mass[c],
                    centred[c].norm() / average,
                    heads[c].norm() / head_average,
                    (len(counts) * marginal[c] + 1e-3).log(),
                    (spread[c] + 1e-2).log(),
                    (len(counts) * counts[c] / counts.sum() + 1e-3).log(),
                ]
            )
            for c in range(len(counts))
        ]
        context = sum(numbers) / len(numbers)
        numbers = [torch.cat([own, context]) for own in numbers]
        return torch.stack(numbers), torch.stack(centred) / average, mean

    def classifier(self, memory: tuple[Tensor, ...], head: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return rows, spread and bias of w, and the trust in each class."""
        phi, rows = self.phi, head.weight.detach()
        numbers, directions, mean = self.evidence(memory, rows)
        length = sum(row.norm() for row in rows) / len(rows)
        out_rows, out_bias, spread, trust = [], [], [], []
        for c in range(len(rows)):
            hidden = relu(phi.net[0].weight @ ((numbers[c] - phi.location) / phi.scale) + phi.net[0].bias)
            step, beta, log_spread = phi.net[2].weight @ hidden + phi.net[2].bias
            move = step * length * directions[c]
            prior = phi.marginal_weight * (memory[3][c] + 1e-3).log()
            heat = phi.log_temperature.exp()
            out_rows.append((rows[c] + move) / heat)
            out_bias.append((head.bias.detach()[c] + beta + prior - move @ mean) / heat)
            spread.append(log_spread.exp() * length / math.sqrt(rows.shape[1]) / heat)
            excess = relu(phi.low - numbers[c]) + relu(numbers[c] - phi.high)
            trust.append((-(excess / phi.scale).sum()).exp())
        return tuple(torch.stack(part) for part in (out_rows, spread, out_bias, trust))

    @torch.no_grad()
    def labels(self, z: Tensor, logits: Tensor, head: Any, trusted: bool = False) -> Tensor:
        """Return y_hat and remember the batch; `trusted` leaves the model's own output out."""
        y = own = logits.softmax(1)
        for _ in range(2):
            rows, spread, bias, _ = self.classifier(self.memory_after(z, y), head)
            y = (z @ rows.T + bias).softmax(1)
        memory = self.memory_after(z, y)
        self.sums, self.counts, self.mass, self.marginal, self.squares = memory
        trust = self.classifier(memory, head)[3]
        y_w = torch.zeros_like(y)
        noise = torch.randn(self.draws, *rows.shape, generator=self.generator, dtype=rows.dtype)
        for s in range(self.draws):
            y_w += (z @ (rows + spread[:, None] * noise[s]).T + bias).softmax(1) / self.draws
        t = torch.ones(len(z), 1) if trusted else (y_w * trust).sum(1, keepdim=True)
        return t * y_w + (1 - t) * own


def exponent(m: list[float], s: float, n: float) -> tuple[float, bool]:
    """Return the power that shares are taken to, and whether it is how sure the labels are that bounds it."""
    classes = len(m)
    unequal = max(0.0, sum((classes * share - 1) ** 2 for share in m) / classes - (classes - 1) / n)
    sure = max(0.2, (s - 1 / classes) / (1 - 1 / classes))
    return min(1 / sure, 4 * math.sqrt(unequal)), 1 / sure < 4 * math.sqrt(unequal)


class SlowVnl:
    """An update held by the anchor, then prediction by labels, on batch statistics or the source's."""

    def __init__(self, source: Any, on_batch: bool, stream: Any = None) -> None:
        self.model = stream.model if stream else copy.deepcopy(source.model).train(on_batch)
        self.look = stream.look if stream else self.model
        self.anchor = copy.deepcopy(source.model).train(on_batch)
        self.generator = torch.Generator().manual_seed(SEED)
        self.anchor_labeler = SlowLabeler(source.anchor_phi, self.generator, DRAWS)
        self.labeler = SlowLabeler(source.predict_phi, self.generator, DRAWS)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LR)
        self.seen, self.taken, classes = 0, 0, len(source.model.head.bias)
        self.batches: list[Tensor] = []
        self.predicted = torch.full((classes,), 1 / classes)
        self.doubt: float | None = None
        self.less = 1.0  # than a whole step, for the anchor doubts less

    def step(self, x: Tensor, steps: int, kind: str, weight: float, entropy_weight: float) -> Tensor:
        with torch.no_grad():
            z, logits = self.anchor.features_and_logits(x)
        if kind == "anchored":
            told = self.anchor_labeler.labels(z, logits, self.anchor.head)
        else:
            told = self.likely(logits)
        self.learn(x, told, steps, kind, weight, entropy_weight)
        with torch.no_grad():
            z, logits = self.model.features_and_logits(x)
        return self.labeler.labels(z, logits, self.model.head)

    def likely(self, logits: Tensor) -> Tensor:
        """Return pi from all batches so far, each with its weight in the average."""
        p = logits.softmax(1) ** 2
        self.batches.append(p / p.sum(1, keepdim=True))
        window = 12 * p.shape[1]
        later = [sum(len(y) for y in self.batches[k + 1 :]) for k in range(len(self.batches))]
        weights = [
            math.exp(-images / window) * (1 - math.exp(-len(y) / window))
            for y, images in zip(self.batches, later, strict=True)
        ]
        pairs = [(w / sum(weights), y) for w, y in zip(weights, self.batches, strict=True)]
        m = sum(w * y.mean(0) for w, y in pairs)
        s = sum(w * (y * y).sum(1).mean() for w, y in pairs)
        if self.doubt is not None:
            self.less = min(1.0, (1 - float(s)) / self.doubt)
        images = sum(map(len, self.batches))
        self.exponent = exponent(m.tolist(), float(s), 2 * window * math.tanh(images / (2 * window)))
        powers = torch.tensor([(float(share) + 0.01 / len(m)) ** self.exponent[0] for share in m])
        return powers.to(logits.dtype) / powers.sum()

    def learn(
        self, x: Tensor, told: Tensor, steps: int, kind: str, weight: float, entropy_weight: float
    ) -> None:
        """Update by the anchor's labels or by the shares it tells."""
        fade = math.exp(-len(x) / (12 * len(self.predicted)))
        for _ in range(steps):
            logits = self.look(x)
            own = torch.distributions.Categorical(logits=logits)
            loss = entropy_weight * own.entropy().mean()
            shares = fade * self.predicted + (1 - fade) * sum(own.probs) / len(x)
            if kind == "anchored":
                loss = loss + weight * cross_entropy(logits, told)
            else:
                pairs = zip(told, shares, strict=True)
                loss = loss + weight * sum(e * (e / p).log() for e, p in pairs) / (1 - fade)
            self.optimizer.zero_grad()
            loss.backward()
            self.taken += 1
            momentum = 1 - 0.9**self.taken  # from rest
            self.optimizer.param_groups[0]["lr"] = LR / (1 + self.seen / HORIZON) * self.less * momentum
            self.optimizer.step()
        self.predicted = shares.detach()
        self.seen += len(x)


def vnl(source: Any, **options: Any) -> Any:
    return adapt(source, "vnl", **{"lr": LR, "seed": SEED, "num_samples": DRAWS, **options})


@pytest.mark.parametrize("kind", ["batch", "source"])
@pytest.mark.parametrize("update", ["marginal", "anchored"])
@pytest.mark.parametrize(("steps", "weights"), [(1, (1.0, 1.0)), (2, (0.5, 2.0))])
def test_updates_held_by_an_anchor_agree_with_the_slow_reference(
    make_source: Any, images: Any, kind: str, update: str, steps: int, weights: tuple[float, float]
) -> None:
    source = make_source()
    weight = "marginal_weight" if update == "marginal" else "anchor_weight"
    told = {"update": update, weight: weights[0], "entropy_weight": weights[1]}
    adapter = vnl(source, statistics=kind, steps=steps, **told)
    slow = SlowVnl(source, kind == "batch")
    for seed, count in enumerate((7, 5, 26)):
        x = images(count, seed)
        torch.testing.assert_close(adapter(x).exp(), slow.step(x, steps, update, *weights), **CLOSE)
    for found, expected in ((adapter.model, slow.model), (adapter.anchor, source.model)):
        for a, b in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("horizon", [HORIZON, None])
def test_steps_are_shorter_where_the_anchor_doubts_less(make_source: Any, images: Any, horizon: Any) -> None:
    source = make_source()
    source.model.head.weight.data *= 3
    told = {"statistics": "source", "predict": "own", "update": "marginal", "horizon": horizon}
    adapter, slow = vnl(source, doubt=0.5, **told), SlowVnl(source, False)
    slow.doubt, shares = 0.5, []
    for seed in range(4):
        x = images(20, seed)
        slow.seen = 0 if horizon is None else slow.seen
        slow.learn(x, slow.likely(slow.anchor(x).detach()), 1, "marginal", MARGINAL_WEIGHT, 1.0)
        torch.testing.assert_close(adapter(x), slow.model(x).detach(), **CLOSE)
        shares.append(slow.less)
    assert 0.1 < min(shares) < max(shares) < 1


def test_more_doubt_than_known_makes_no_step_longer(make_source: Any, images: Any) -> None:
    one, other = vnl(make_source(), doubt=1e-3), vnl(make_source())
    assert torch.equal(one(images(8)), other(images(8)))


@pytest.mark.parametrize("doubt", [-0.1, 1.1, float("nan"), "0.1", True])
def test_a_doubt_that_is_none_is_refused(make_source: Any, doubt: Any) -> None:
    with pytest.raises(ConfigError, match="doubt"):
        vnl(make_source(), doubt=doubt)


def test_the_default_agrees_with_the_slow_reference(make_source: Any, images: Any, slow_stream: Any) -> None:
    source = make_source()
    adapter, stream, anchor = vnl(source), slow_stream(source), slow_stream(source)
    slow = SlowVnl(source, True, stream=stream)
    for seed, count in enumerate((7, 5, 6)):
        x = images(count, seed)
        for part in (stream, anchor):
            part.begin()
        slow.learn(x, slow.likely(anchor.take(x)[1]), 1, "marginal", MARGINAL_WEIGHT, 1.0)
        y_hat = slow.labeler.labels(*stream.take(x), stream.model.head)
        torch.testing.assert_close(adapter(x).exp(), y_hat, **CLOSE)
    for found, expected in zip(adapter.model.parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("lean", [0.0, 1.5, 4.0])
def test_skewed_streams_agree_with_the_slow_reference(make_source: Any, images: Any, lean: float) -> None:
    """An anchor that leans to a class, over some batches: shares are levelled, and brought out."""
    source = make_source()
    source.model.head.bias.data[0] += lean
    adapter, slow = vnl(source, statistics="source", predict="own"), SlowVnl(source, False)
    bounded = []
    for seed in range(4):
        x = images(20, seed)
        with torch.no_grad():
            told = slow.likely(slow.anchor.features_and_logits(x)[1])
        slow.learn(x, told, 1, "marginal", MARGINAL_WEIGHT, 1.0)
        bounded.append(slow.exponent[1])
        with torch.no_grad():
            expected = slow.model.features_and_logits(x)[1]
        torch.testing.assert_close(adapter(x), expected, **CLOSE)
    assert bounded[-1] == (lean > 0)


def test_shares_come_back_right_after_a_guard_went_back(make_source: Any, images: Any) -> None:
    """A guard puts back the state of the averages and leaves the count of images seen."""
    adapter, alone = (vnl(make_source(), predict="own", statistics="source") for _ in range(2))
    for seed in range(30):
        adapter(images(20, seed))
    seen = adapter.seen.clone()
    adapter.reset()
    adapter.seen.copy_(seen)
    logits = adapter.anchor.features_and_logits(images(20, 99))[1].detach()
    torch.testing.assert_close(adapter._expected(logits), alone._expected(logits))


def test_the_reference_above_is_not_trivial(make_source: Any, images: Any) -> None:
    """Trust lies between its ends, labels differ from the model's own output, and the noise matters."""
    source, x = make_source(), images(7)
    z, logits = (value.detach() for value in source.model.features_and_logits(x))
    labels = [SlowLabeler(source.anchor_phi, torch.Generator().manual_seed(seed), DRAWS) for seed in (0, 1)]
    first, second = (labeler.labels(z, logits, source.model.head) for labeler in labels)
    memory = labels[0].sums, labels[0].counts, labels[0].mass, labels[0].marginal, labels[0].squares
    trust = labels[0].classifier(memory, source.model.head)[3]
    assert (trust < 0.99).any()
    assert (trust > 0.05).any()
    assert (first - logits.softmax(1)).abs().max() > 0.01
    assert (first - second).abs().max() > 1e-4


def test_a_labeler_remembers_counts_and_mass_apart(make_source: Any, images: Any) -> None:
    source = make_source()
    labeler = adapt(source, "labels", statistics="source")
    labeler(images(6))
    memory = labeler.labeler.memory
    assert len({value.data_ptr() for value in memory}) == len(memory)
    # A class's count is its mass with every part squared, and no prediction here is certain.
    assert (memory.counts < 0.99 * memory.mass).all()


@pytest.mark.parametrize("method", ["labels", "vnl"])
def test_labels_without_update_agree_with_the_slow_reference(
    make_source: Any, images: Any, method: str
) -> None:
    source = make_source()
    told = {"update": "none", "statistics": "source", "seed": SEED, "num_samples": DRAWS}
    adapter = adapt(source, method, **told)
    phi = source.anchor_phi if method == "labels" else source.predict_phi
    slow = SlowLabeler(phi, torch.Generator().manual_seed(SEED), DRAWS)
    for seed, count in enumerate((7, 5, 6)):
        x = images(count, seed)
        with torch.no_grad():
            expected = slow.labels(*source.model.features_and_logits(x), source.model.head)
        torch.testing.assert_close(adapter(x).exp(), expected, **CLOSE)
    for found, wanted in zip(adapter.model.parameters(), source.model.parameters(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["batch", "source", "blend", "stream"])
def test_without_update_and_labels_it_is_bn(make_source: Any, images: Any, kind: str) -> None:
    source = make_source()
    adapter = vnl(source, update="none", predict="own", statistics=kind)
    plain = adapt(source, "bn", statistics=kind)
    for seed, count in enumerate((7, 1, 5)):
        assert torch.equal(adapter(images(count, seed)), plain(images(count, seed)))
    assert adapter.optimizer is None
    assert not hasattr(adapter, "anchor")


@pytest.mark.parametrize("kind", ["batch", "source", "blend", "stream"])
def test_entropy_alone_is_soft(make_source: Any, images: Any, kind: str) -> None:
    source = make_source()
    adapter = vnl(source, update="entropy", predict="own", statistics=kind)
    soft = adapt(source, "soft", statistics=kind, lr=LR, horizon=HORIZON, from_rest=True)
    for seed, count in enumerate((7, 1, 5)):
        assert torch.equal(adapter(images(count, seed)), soft(images(count, seed)))
    assert not hasattr(adapter, "anchor")


def test_own_and_labels_predict_differently_from_the_same_update(make_source: Any, images: Any) -> None:
    source, x = make_source(), images(7)
    own, labels = vnl(source, predict="own"), vnl(source, predict="labels")
    heard: list[Tensor] = []
    labels.observer = lambda z, logits, head: heard.append(logits)
    told = own(x), labels(x)
    assert torch.equal(heard[0], told[0])
    assert (told[0].softmax(1) - told[1].exp()).abs().max() > 0.01
    torch.testing.assert_close(told[1].exp().sum(1), torch.ones(7, dtype=torch.float64))


@pytest.mark.parametrize("update", ["marginal", "anchored"])
def test_the_anchor_stays_where_it_is(make_source: Any, images: Any, update: str) -> None:
    source = make_source()
    adapter = vnl(source, update=update)
    adapter(images(6))
    for found, wanted in zip(adapter.anchor.parameters(), source.model.parameters(), strict=True):
        assert torch.equal(found, wanted)
        assert not found.requires_grad


@pytest.mark.parametrize("lean", [1.0, 2.0, 3.0])
def test_the_anchor_s_shares_keep_classes_from_vanishing(make_source: Any, images: Any, lean: float) -> None:
    """A model that leans to one class, at a long step: entropy alone loses others for good."""
    source, smallest = make_source(), {}
    for update in ("entropy", "marginal"):
        adapter = vnl(source, update=update, predict="own", lr=1e-2, statistics="batch")
        adapter.model.head.bias.data[0] += lean
        shares = [adapter(images(20, seed)).softmax(1).mean(0) for seed in range(40)]
        smallest[update] = float(torch.stack(shares[-10:]).mean(0).min())
    assert smallest["entropy"] < 0.01
    assert smallest["marginal"] > 0.1


def test_shares_are_part_of_the_state(make_source: Any, images: Any) -> None:
    adapter = vnl(make_source())
    started = {"counted": torch.zeros(4), "sureness": torch.zeros(()), "predicted": torch.full((4,), 1 / 4)}
    for name, value in started.items():
        torch.testing.assert_close(getattr(adapter, name), value.double())
    adapter(images(6))
    for name, value in started.items():
        assert (getattr(adapter, name) - value).abs().max() > 1e-4
    # Six images of a window of 48: what the averages have of the stream.
    begun = 1 - math.exp(-6 / 48)
    torch.testing.assert_close(float(adapter.counted.sum()), begun)
    assert begun / 4 < float(adapter.sureness) < begun
    torch.testing.assert_close(float(adapter.predicted.sum()), 1.0)
    adapter.reset()
    for name, value in started.items():
        torch.testing.assert_close(getattr(adapter, name), value.double())


@pytest.mark.parametrize("method", ["labels", "vnl"])
@pytest.mark.parametrize("side", ["low", "high"])
def test_far_outside_what_phi_was_fitted_on_the_model_speaks_for_itself(
    make_source: Any, images: Any, method: str, side: str
) -> None:
    source = make_source()
    for phi in (source.anchor_phi, source.predict_phi):
        getattr(phi, side).fill_(1e6 if side == "low" else -1e6)
    adapter = adapt(source, method, statistics="batch")
    heard: list[Tensor] = []
    adapter.observer = lambda z, logits, head: heard.append(logits.softmax(1))
    for seed in range(2):
        found = adapter(images(6, seed))
        assert torch.equal(found, heard[-1].log())


@pytest.mark.parametrize("method", ["labels", "vnl"])
def test_inside_the_range_it_is_all_neighbor_labels(make_source: Any, images: Any, method: str) -> None:
    source = make_source()
    for phi in (source.anchor_phi, source.predict_phi):
        phi.low.fill_(-math.inf)
        phi.high.fill_(math.inf)
    adapter = adapt(source, method, statistics="batch", update="none", seed=SEED, num_samples=DRAWS)
    phi = copy.deepcopy(source.anchor_phi if method == "labels" else source.predict_phi)
    slow = SlowLabeler(phi, torch.Generator().manual_seed(SEED), DRAWS)
    training = copy.deepcopy(source.model).train()
    for seed in range(2):
        with torch.no_grad():
            z, logits = training.features_and_logits(images(6, seed))
            expected = slow.labels(z, logits, source.model.head, trusted=True)
        torch.testing.assert_close(adapter(images(6, seed)).exp(), expected, **CLOSE)


@pytest.mark.parametrize("missing", ["anchor_phi", "predict_phi"])
def test_a_model_without_an_out_of_fold_phi_is_refused_only_where_it_is_needed(
    make_source: Any, images: Any, missing: str
) -> None:
    source = make_source()
    setattr(source, missing, None)
    asking = {"predict_phi": {"predict": "labels"}, "anchor_phi": {"update": "anchored"}}
    with pytest.raises(AdapterError, match="out-of-fold"):
        vnl(source, **asking[missing])
    adapter = vnl(source)
    assert adapter.settings.predict == ("own" if missing == "predict_phi" else "labels")
    assert adapter(images(4)).isfinite().all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"update": "Anchored"},
        {"marginal_weight": -1.0},
        {"window": 0.0},
        {"window": math.inf},
        {"anchor_weight": -1.0},
        {"entropy_weight": -1.0},
        {"predict": "both"},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        VnlSettings(**wrong)


def test_any_classifier_is_adapted_without_training_its_own_output_predicts(images: Any) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm2d(6), torch.nn.Flatten(), torch.nn.LazyLinear(4)
    ).double()
    net(images(2))
    before = [value.clone() for value in net.parameters()]
    adapter = adapt(net, "vnl")
    assert adapter.settings.predict == "own"
    assert adapter(images(6)).isfinite().all()
    pairs = zip(before, adapter.model.parameters(), strict=True)
    assert any((a - b).abs().max() > 0 for a, b in pairs)
    with pytest.raises(AdapterError, match=r"needs a model trained by vicinal \(.*its own output predicts\)"):
        adapt(net, "vnl", predict="labels")


class _ConvolutionLast(torch.nn.Module):
    """Its last linear layer, of five outputs, is not its classifier, of four."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm2d(6)
        self.fc, self.out = torch.nn.Linear(6, 5), torch.nn.Conv2d(5, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(self.norm(self.stem(x)).relu().mean((2, 3))).relu()
        return self.out(z[..., None, None]).flatten(1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"update": "neighbors"},
        {"update": "entropy", "agreement": 1.0},
        {"update": "none", "predict": "neighbors"},
    ],
    ids=str,
)
def test_a_linear_layer_that_is_no_classifier_is_said_to_be_none(options: dict[str, Any]) -> None:
    adapter = adapt(_ConvolutionLast(), "vnl", **options)
    with pytest.raises(AdapterError, match=r"returns 4 logits and its last linear layer 5: name its class"):
        adapter(torch.rand(9, 3, 16, 16))


def test_entropy_alone_counts_no_classes(images: Any) -> None:
    adapter = adapt(_ConvolutionLast(), "vnl", update="entropy")
    assert adapter(images(9)).shape == (9, 4)
