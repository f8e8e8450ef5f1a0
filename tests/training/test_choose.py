from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.adapters.methods import METHODS, adapt, configure
from vicinal.adapters.vnl import Vnl
from vicinal.adapters.vnl_settings import OF_VOTES, VOTES, VnlSettings
from vicinal.checkpoint import Trained
from vicinal.data.domains import SourceDomain
from vicinal.functional.calibration import fitted_temperature
from vicinal.training import choose
from vicinal.training.choose import Chosen, Row, choose_rule, safest, surest
from vicinal.training.config import OutOfFoldConfig, TrainConfig
from vicinal.training.left_out import Fold, LeftOutStream, left_out_streams, predict_all
from vicinal.training.predictors import fitted_without
from vicinal.training.progress import Silent
from vicinal.training.sureness import Sureness, Told, fitted_sureness
from vicinal.training.train import ModelSpec, train

MakeSources = Callable[..., list[SourceDomain]]
CONFIG = OutOfFoldConfig(
    batch_size=8,
    epochs=5,
    hardenings=("posterised",),
    step_sizes=(1e-3, 2e-2),
    updates=("none", "marginal", "anchored", "entropy"),
    baselines=("soft", "hard"),
)
CANDIDATES = {("none", None, None)} | {
    (update, lr, rests)
    for update in ("marginal", "anchored", "entropy")
    for lr in (1e-3, 2e-2)
    for rests in (False, True)
}


@pytest.fixture(scope="module")
def streams(spec: ModelSpec, make_sources: MakeSources) -> list[LeftOutStream]:
    """Return the streams of two models, each trained for a moment without one domain."""
    one, other = make_sources(2, train=64, val=16)
    config = TrainConfig(algorithm="erm", iterations=30, batch_size=8, backbone_lr=2e-3)
    every = [Fold(train(spec, [seen], config), (left,)) for seen, left in ((one, other), (other, one))]
    return left_out_streams(every, CONFIG, 0)


@pytest.fixture(scope="module")
def chosen(streams: list[LeftOutStream]) -> Chosen:
    return choose_rule(streams, CONFIG, 0, Silent())


def rows_of(chosen: Chosen, method: str) -> list[Row]:
    return [row for row in chosen.table if row.method == method]


def candidate(row: Row) -> tuple[str, float | None, bool | None]:
    return ("none", None, None) if row.update == "none" else (row.update, row.lr, row.from_rest)


def test_the_table_holds_exactly_the_candidates(chosen: Chosen) -> None:
    assert {row.method for row in chosen.table} == {"vnl", "soft", "hard"}
    own = [candidate(row) for row in rows_of(chosen, "vnl") if row.predict == "own"]
    labels = [candidate(row) for row in rows_of(chosen, "vnl") if row.predict == "labels"]
    assert sorted(own, key=str) == sorted(CANDIDATES, key=str)
    assert labels
    assert set(labels) <= CANDIDATES
    assert len(set(labels)) == len(labels)


def test_every_baseline_is_tried_at_every_step_size_on_both_statistics(chosen: Chosen) -> None:
    grid = sorted((lr, kind) for lr in CONFIG.step_sizes for kind in ("batch", "stream"))
    for method in CONFIG.baselines:
        assert sorted((row.lr, row.statistics) for row in rows_of(chosen, method)) == grid


@pytest.mark.parametrize("updates", [CONFIG.updates, ("marginal", "entropy")])
@pytest.mark.parametrize("tolerance", [0.0, 0.02])
def test_the_chosen_vnl_row_is_the_most_accurate_or_near_it(
    tolerance: float, updates: Any, streams: list[LeftOutStream]
) -> None:
    config = replace(CONFIG, tolerance=tolerance, updates=updates, baselines=())
    found = choose_rule(streams, config, 0, Silent())
    rows = rows_of(found, "vnl")
    (final,) = [row for row in rows if row.chosen]
    # The choices of update and predictor may give up the tolerance each, that of a step size what is near.
    assert final.accuracy >= max(row.accuracy for row in rows) - 2 * tolerance - CONFIG.near


def made(update: str, accuracy: float, nll: float = 1.0, lr: float = 1e-3) -> Row:
    return Row("vnl", update, lr, False, "stream", "own", accuracy, nll, worst=0.0)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (made("entropy", 0.91), made("none", 0.90)),  # more than the tolerance apart: accuracy decides
        (made("none", 0.90, nll=2.0), made("anchored", 0.904)),
        (made("anchored", 0.90, nll=2.0), made("entropy", 0.904)),
        (made("marginal", 0.90, nll=2.0), made("anchored", 0.904)),
        (made("anchored", 0.90, nll=0.5), made("anchored", 0.904, lr=1e-2)),
    ],
    ids=["accuracy", "no update", "anchor", "shares", "likelihood"],
)
def test_level_rules_are_ranked_by_what_can_go_wrong(better: Row, worse: Row) -> None:
    assert safest([better, worse], 0.005, 0.02) is safest([worse, better], 0.005, 0.02) is better


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (made("marginal", 0.90, nll=0.4), made("marginal", 0.915, nll=0.5, lr=1e-2)),
        (made("marginal", 0.93, nll=0.5), made("marginal", 0.90, nll=0.4, lr=1e-2)),  # too far behind
        (made("marginal", 0.90, nll=0.5), made("marginal", 0.90, nll=float("nan"), lr=1e-2)),
        (made("marginal", 0.90, nll=0.5), made("marginal", 0.90, nll=float("inf"), lr=1e-2)),
    ],
    ids=["likelihood", "accuracy", "not a number", "infinite"],
)
def test_near_the_best_likelihood_decides(better: Row, worse: Row) -> None:
    assert surest([better, worse], 0.02) is surest([worse, better], 0.02) is better
    assert safest([worse, better], 0.005, 0.02) is better


def test_who_predicts_is_decided_by_what_is_level_and_not_by_what_is_near() -> None:
    better, worse = made("marginal", 0.91, nll=0.5), made("marginal", 0.90, nll=0.4)
    worse = replace(worse, predict="labels")
    told: list[tuple[Row, list[Tensor]]] = [(better, []), (worse, [])]
    for pairs in (told, told[::-1]):
        assert choose._predictor(pairs, replace(CONFIG, tolerance=0.005, near=0.02))[0] is better
        assert choose._predictor(pairs, replace(CONFIG, tolerance=0.02, near=0.0))[0] is worse


def test_doubt_is_never_below_zero(streams: list[LeftOutStream], monkeypatch: pytest.MonkeyPatch) -> None:
    lessons = choose._still_lessons(streams[:2])
    # As a GPU rounds the mean of many ones.
    monkeypatch.setattr(choose, "mean_square", lambda y: torch.tensor(1 + 1e-6))
    assert choose._doubt(lessons) == 0


def test_what_is_given_up_for_likelihood_does_not_make_no_update_level() -> None:
    rows = [made("none", 0.88, nll=0.5), made("marginal", 0.884, nll=0.35), made("marginal", 0.90, nll=0.355)]
    assert safest(rows, 0.005, 0.02) is rows[1]


def test_one_vnl_row_is_chosen_and_its_settings_are_the_rule(chosen: Chosen) -> None:
    (final,) = [row for row in rows_of(chosen, "vnl") if row.chosen]
    rule = dict(chosen.methods["vnl"]["stream"])
    assert 0 < rule.pop("doubt") < 1
    named = {"update": final.update, "lr": final.lr, "from_rest": final.from_rest, "predict": final.predict}
    assert rule == named


def test_the_rule_knows_how_much_still_models_doubted_on_the_left_out_streams(
    chosen: Chosen, streams: list[LeftOutStream]
) -> None:
    doubts = []
    for stream in streams:
        still, order = adapt(stream.trained, "bn", statistics="stream"), stream.stream.order
        p = torch.cat([still(x).softmax(-1) for x in stream.stream.batches("cpu")]) ** 2
        y = p / p.sum(-1, keepdim=True)
        doubts.append(1 - float((y**2).sum()) / len(order))
    assert chosen.methods["vnl"]["stream"]["doubt"] == pytest.approx(sum(doubts) / len(doubts), rel=1e-5)


def test_a_rule_may_be_told_not_to_heed_it(streams: list[LeftOutStream]) -> None:
    config = replace(CONFIG, heed_doubt=False, updates=("none", "marginal"), baselines=())
    assert choose_rule(streams, config, 0, Silent()).methods["vnl"]["stream"]["doubt"] is None


def test_candidates_are_tried_with_that_doubt(
    streams: list[LeftOutStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stream with less doubt than the mean their steps are shorter there too, as they will be."""
    tried, build = [], choose.Vnl

    def note(trained: Trained, settings: VnlSettings) -> Vnl:
        tried.append(settings)
        return build(trained, settings)

    monkeypatch.setattr(choose, "Vnl", note)
    found = choose_rule(streams, CONFIG, 0, Silent()).methods["vnl"]["stream"]["doubt"]
    assert {settings.doubt for settings in tried if settings.update == "marginal"} == {found}


def test_anchored_candidates_are_tried_with_labels_of_a_phi_that_saw_nothing_of_their_domain(
    streams: list[LeftOutStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    given, play = [], choose.play_all

    def note(build: Any, those: Any) -> Any:
        given.append([(one.domain, one.trained.anchor_phi) for one in those])
        return play(build, those)

    monkeypatch.setattr(choose, "play_all", note)
    config = replace(
        CONFIG, updates=("none", "anchored"), step_sizes=(1e-3,), from_rest=(True,), baselines=()
    )
    chosen = choose_rule(streams, config, 0, Silent())
    still = play(partial(Vnl, settings=VnlSettings(update="none", predict="own")), streams)
    by_domain = fitted_without([one.domain for one in streams], [one.lesson for one in still], config, 0)
    assert len(by_domain) == 2
    tried = given[-1]
    assert [domain for domain, _ in tried] == [one.domain for one in streams]
    for domain, phi in tried:
        assert phi is not None
        for name, value in by_domain[domain].state_dict().items():
            torch.testing.assert_close(phi.state_dict()[name], value)
        assert any(
            not torch.equal(value, chosen.anchor_phi.state_dict()[name])
            for name, value in phi.state_dict().items()
        )


def test_every_baseline_has_options_for_both_statistics_and_they_are_its_surest(chosen: Chosen) -> None:
    assert set(chosen.methods) == {"vnl", "soft", "hard"}
    for method in CONFIG.baselines:
        assert {"batch", "stream"} <= set(chosen.methods[method])
        for kind in ("batch", "stream"):
            rows = [row for row in rows_of(chosen, method) if row.statistics == kind]
            (marked,) = [row for row in rows if row.chosen]
            near = [row for row in rows if row.accuracy >= max(row.accuracy for row in rows) - CONFIG.near]
            assert marked.nll == min(row.nll for row in near)
            assert chosen.methods[method][kind] == {"lr": marked.lr}


def test_scores_are_means_over_the_streams(chosen: Chosen, streams: list[LeftOutStream]) -> None:
    for row in chosen.table:
        assert 0 <= row.worst <= row.accuracy <= 1
    (row,) = [
        row for row in rows_of(chosen, "soft") if row.lr == CONFIG.step_sizes[1] and row.statistics == "batch"
    ]
    accuracies, nlls = [], []
    for stream in streams:
        adapter = METHODS["soft"].build(stream.trained, replace(METHODS["soft"].defaults, lr=row.lr))
        p = torch.cat([adapter(x).softmax(-1) for x in stream.stream.batches("cpu")])
        accuracies.append(sum(p.argmax(-1) == stream.labels).item() / len(p))
        nlls.append(float(F.nll_loss(p.log(), stream.labels)))
    assert row.accuracy == pytest.approx(sum(accuracies) / len(streams))
    assert row.nll == pytest.approx(sum(nlls) / len(streams), rel=1e-5)
    assert row.worst == pytest.approx(min(accuracies))


def test_both_phis_are_fitted(chosen: Chosen) -> None:
    for phi in (chosen.anchor_phi, chosen.predict_phi):
        assert torch.isfinite(phi.low).all()
        assert torch.isfinite(phi.high).all()
        assert all(torch.isfinite(value).all() for value in phi.state_dict().values())


def test_the_choice_is_what_an_adapter_then_runs(chosen: Chosen, streams: list[LeftOutStream]) -> None:
    trained = replace(
        streams[0].trained,
        anchor_phi=chosen.anchor_phi,
        predict_phi=chosen.predict_phi,
        choice={"methods": chosen.methods, "table": [asdict(row) for row in chosen.table]},
    )
    x = next(streams[0].stream.batches("cpu"))
    for method, by_kind in chosen.methods.items():
        for kind, options in by_kind.items():
            adapter = adapt(trained, method, statistics=kind)
            assert {name: getattr(adapter.settings, name) for name in options} == options
            assert torch.isfinite(adapter(x)).all()


def test_a_seed_fixes_the_choice(chosen: Chosen, streams: list[LeftOutStream]) -> None:
    torch.manual_seed(4)
    before = torch.random.get_rng_state()
    again = choose_rule(streams, CONFIG, 0, Silent())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert again.table == chosen.table
    assert again.methods == chosen.methods
    for one, other in ((again.anchor_phi, chosen.anchor_phi), (again.predict_phi, chosen.predict_phi)):
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_the_left_out_models_are_not_changed_by_being_tried(streams: list[LeftOutStream]) -> None:
    def state(trained: Trained) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in trained.model.state_dict().items()}

    before = [state(stream.trained) for stream in streams]
    choose_rule(streams[:2], replace(CONFIG, epochs=1, step_sizes=(0.1,), baselines=("hard",)), 0, Silent())
    for stream, kept in zip(streams, before, strict=True):
        assert all(torch.equal(value, kept[name]) for name, value in state(stream.trained).items())
        assert stream.trained.anchor_phi is None


@pytest.mark.parametrize("options", [{"baselines": ()}, {"updates": ("none",)}, {"step_sizes": (1e-3,)}])
def test_a_smaller_set_of_candidates_is_enough(options: dict[str, Any], streams: list[LeftOutStream]) -> None:
    found = choose_rule(streams[:1], replace(CONFIG, epochs=1, **options), 0, Silent())
    assert sum(row.chosen for row in rows_of(found, "vnl")) == 1
    assert {"vnl", *replace(CONFIG, **options).baselines} == set(found.methods)


@pytest.mark.parametrize("votes", VOTES)
@pytest.mark.parametrize("update", ["none", "marginal", "neighbors"])
def test_neighbors_are_tried_as_an_adapter_runs_them(
    update: Any, votes: Any, streams: list[LeftOutStream]
) -> None:
    """What stands in the table for votes of neighbors, made from what was recorded, is what they predict."""
    options = {"updates": (update,), "predictors": ("own", "neighbors"), "step_sizes": (1e-2,)}
    config = replace(CONFIG, epochs=1, baselines=(), from_rest=(False,), votes=votes, **options)
    found = choose_rule(streams, config, 0, Silent())
    assert [(row.update, row.predict) for row in found.table] == [(update, "own"), (update, "neighbors")]
    rule = found.methods["vnl"]["stream"]
    for row in found.table:
        right, nll = [], []
        for stream in streams:
            told = {"update": row.update, "predict": row.predict, "lr": row.lr, "from_rest": False}
            adapter = adapt(stream.trained, "vnl", doubt=rule["doubt"], **told, **VOTES[votes])
            p = torch.cat([adapter(x) for x in stream.stream.batches(torch.device("cpu"))])
            right.append(float((p.argmax(-1) == stream.labels).float().mean()))
            nll.append(float(F.cross_entropy(p, stream.labels)))
        assert row.accuracy == pytest.approx(sum(right) / len(right))
        assert row.nll == pytest.approx(sum(nll) / len(nll), abs=1e-4)
    assert rule["predict"] == next(row.predict for row in found.table if row.chosen)
    voting = "neighbors" in (rule["update"], rule["predict"])
    assert {name for name in rule if name in OF_VOTES} == (set(VOTES[votes]) if voting else set())


def test_one_predictor_is_enough(streams: list[LeftOutStream]) -> None:
    config = replace(CONFIG, epochs=1, baselines=(), updates=("none",), predictors=("neighbors",))
    found = choose_rule(streams[:1], config, 0, Silent())
    assert [(row.predict, row.chosen) for row in found.table] == [("own", False), ("neighbors", True)]


@pytest.mark.parametrize("update", ["none", "marginal"])
def test_neighbors_that_were_chosen_vote_as_they_were_tried(
    update: Any, streams: list[LeftOutStream]
) -> None:
    config = replace(CONFIG, epochs=1, baselines=(), updates=(update,), predictors=("neighbors",))
    rule = choose_rule(streams[:1], config, 0, Silent()).methods["vnl"]["stream"]
    assert rule.items() >= VOTES["rounds"].items()


def test_a_temperature_is_fitted_to_what_each_candidate_predicts(streams: list[LeftOutStream]) -> None:
    config = replace(CONFIG, calibrate=True, updates=("none", "entropy"), step_sizes=(2e-2,))
    plain, found = (
        choose_rule(streams, one, 0, Silent()) for one in (replace(config, calibrate=False), config)
    )
    assert {row.temperature for row in plain.table} == {1.0}
    assert [replace(row, temperature=1.0) for row in found.table] == plain.table, "all else is as it was"
    labels = [stream.labels for stream in streams]
    for row in found.table:
        if row.method == "soft":
            options = {"lr": row.lr, "statistics": row.statistics}
            built = partial(METHODS["soft"].build, settings=configure(METHODS["soft"].defaults, options))
            assert row.temperature == pytest.approx(fitted_temperature(predict_all(built, streams), labels))
    for row in (row for row in found.table if row.chosen):
        kind = "stream" if row.method == "vnl" else row.statistics
        assert found.methods[row.method][kind]["output_temperature"] == row.temperature
    assert all(
        "output_temperature" not in rule for kinds in plain.methods.values() for rule in kinds.values()
    )


def test_a_rule_may_be_as_sure_as_it_agrees_with_models_that_are_not_updated(
    streams: list[LeftOutStream],
) -> None:
    config = replace(CONFIG, calibrate=True, updates=("entropy",), step_sizes=(2e-2,), predictors=("own",))
    plain, found = (
        choose_rule(streams, replace(config, agreement=asked), 0, Silent()) for asked in (False, True)
    )
    assert {row.sureness is None for row in plain.table} == {True}
    rows = [(replace(row, sureness=None, temperature=1.0), row) for row in found.table]
    assert [row for row, _ in rows] == [replace(row, temperature=1.0) for row in plain.table]
    (final,) = [row for row in found.table if row.sureness is not None]
    told_of = final.sureness
    assert told_of is not None
    sure = Sureness(**told_of)
    rule = found.methods["vnl"]["stream"]
    assert final.temperature == rule.get("output_temperature", 1.0), "the table says what is kept"
    assert {name: rule[name] for name in sure.options} == sure.options
    assert ("agreement" in rule) != ("output_temperature" in rule)
    assert "agreement" not in found.methods["vnl"]["batch"], "of no other statistics is it known"
    # By hand: what models say that are not updated, and what the rule predicts.
    settings = VnlSettings(
        update="entropy", predict="own", lr=2e-2, from_rest=rule["from_rest"], doubt=rule["doubt"]
    )
    outputs = predict_all(partial(Vnl, settings=settings), streams)
    said = predict_all(
        partial(METHODS["bn"].build, settings=configure(METHODS["bn"].defaults, {"statistics": "stream"})),
        streams,
    )
    told = [
        Told(
            one.domain,
            p.view(-1, CONFIG.batch_size, p.shape[-1]),
            q.argmax(-1).view(-1, CONFIG.batch_size),
            one.labels.view(-1, CONFIG.batch_size),
        )
        for one, p, q in zip(streams, outputs, said, strict=True)
    ]
    assert sure == pytest.approx(fitted_sureness(told, VnlSettings()), rel=1e-3)
