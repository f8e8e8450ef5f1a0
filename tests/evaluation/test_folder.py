import csv
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.methods import adapt
from vicinal.checkpoint import Trained
from vicinal.data.files import list_images
from vicinal.data.images import decode_all
from vicinal.data.streams import online_order
from vicinal.errors import DataError
from vicinal.evaluation.folder import Prediction, PredictionFile, adapted, predict_folder, write_predictions
from vicinal.models.backbones import Preprocessing, build_classifier


@pytest.fixture(scope="module")
def source() -> Trained:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        preprocessing = Preprocessing(8, 3, (0.5,) * 3, (0.25,) * 3)
        model = build_classifier("small", 3, preprocessing=preprocessing)
    return Trained(model.eval(), "small", ("a", "b", "c"), preprocessing, "erm")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    root = tmp_path / "images"
    (root / "deep").mkdir(parents=True)
    for index in (1, 2, 10):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(root / f"{index}.png")
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(root / "deep" / f"{index}.png")
    return root


def test_every_image_gets_a_prediction_in_natural_order(source: Trained, folder: Path) -> None:
    counted: list[tuple[int, int]] = []
    result = predict_folder(
        adapt(source, "soft"), source, folder, 4, progress=lambda *pair: counted.append(pair)
    )
    assert [line.path for line in result.predictions] == [
        "1.png", "2.png", "10.png", "deep/1.png", "deep/2.png", "deep/10.png",
    ]  # fmt: skip
    assert counted == [(4, 6), (6, 6)]
    assert result.bad == []


def test_images_arrive_in_a_drawn_order_unless_told_otherwise(source: Trained, folder: Path) -> None:
    paths, fed = list_images(folder), source.preprocessing
    images = decode_all(paths, fed.size, fed.channels, False)[0].float() / 255
    for seed, order in (
        (None, list(range(6))),
        (0, online_order(6, 0).tolist()),
        (3, online_order(6, 3).tolist()),
    ):
        result = predict_folder(adapt(source, "soft", lr=1e-2), source, folder, 2, seed=seed)
        adapter, p = adapt(source, "soft", lr=1e-2), torch.empty(6)
        for part in torch.tensor(order).split(2):
            p[part] = adapter(images[part]).softmax(-1).amax(-1).detach()
        assert [line.probability for line in result.predictions] == pytest.approx(p.tolist(), abs=1e-6)
        assert [line.path for line in result.predictions] == [str(path.relative_to(folder)) for path in paths]


def test_what_was_predicted_before_an_interrupt_is_kept(source: Trained, folder: Path) -> None:
    def interrupt(done: int, _: int) -> None:
        if done >= 4:
            raise KeyboardInterrupt

    result = predict_folder(adapt(source, "soft"), source, folder, 2, progress=interrupt)
    whole = predict_folder(adapt(source, "soft"), source, folder, 2)
    assert (len(result.predictions), result.left) == (4, 2)
    assert {*result.predictions} < {*whole.predictions}

    def at_once(done: int, total: int) -> None:
        raise KeyboardInterrupt

    adapter = adapt(source, "soft")
    adapter.register_forward_pre_hook(at_once)
    with pytest.raises(KeyboardInterrupt):
        predict_folder(adapter, source, folder, 2)


def test_a_prediction_is_the_model_s(source: Trained, folder: Path) -> None:
    result = predict_folder(adapt(source, "erm"), source, folder, 6)
    for line in result.predictions:
        pixels = np.asarray(Image.open(folder / line.path), dtype=np.float32) / 255
        with torch.no_grad():
            p = source.model(torch.from_numpy(pixels).permute(2, 0, 1)[None]).softmax(-1)[0].tolist()
        assert line.label == "abc"[p.index(max(p))]
        assert line.probability == pytest.approx(max(p), abs=1e-5)
        assert line.entropy == pytest.approx(-sum(v * np.log(v) for v in p), abs=1e-5)


def test_a_batch_of_bad_images_is_no_step(source: Trained, folder: Path) -> None:
    for name in ("1.png", "2.png"):
        (folder / name).write_bytes(b"text")
    adapter = adapt(source, "soft")
    result = predict_folder(adapter, source, folder, 2, seed=None, skip_bad=True)
    assert len(result.predictions) == 4
    assert [line.split(":")[0].rsplit("/", 1)[-1] for line in result.bad] == ["1.png", "2.png"]
    assert adapter.steps_taken == 2


def test_a_bad_image_stops_unless_told_otherwise(source: Trained, folder: Path) -> None:
    (folder / "deep" / "2.png").write_bytes(b"text")
    said = r"deep/2\.png: not an image.*--skip-bad to go on without it: 2 of 6 images are left"
    with pytest.raises(DataError, match=said):
        predict_folder(adapt(source, "erm"), source, folder, 2, seed=None)


def test_predictions_are_kept_batch_by_batch(source: Trained, folder: Path) -> None:
    kept: list[dict[int, Prediction]] = []
    result = predict_folder(
        adapt(source, "soft"), source, folder, 4, keep=lambda found: kept.append(dict(found))
    )
    assert [list(found) for found in kept] == [
        online_order(6, 0).tolist()[:4],
        online_order(6, 0).tolist()[4:],
    ]
    together = kept[0] | kept[1]
    assert [together[number] for number in range(6)] == result.predictions


A, B, C = (
    Prediction(name, "x", 0.5, 0.25, spread) for name, spread in (("a", None), ("b", 0.1), ("c", None))
)


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_rows_are_on_disk_as_they_come_and_in_order_of_names_in_the_end(tmp_path: Path) -> None:
    rows = PredictionFile(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    rows.add({2: C})
    head = "path,label,probability,entropy,spread"
    assert lines_of(rows.partial) == [head, "c,x,0.500000,0.250000,"]
    rows.add({1: B, 0: A})
    assert lines_of(rows.partial)[2:] == ["b,x,0.500000,0.250000,0.100000", "a,x,0.500000,0.250000,"]
    assert not rows.whole.exists()
    assert rows.stop() == 3
    assert [line[0] for line in lines_of(rows.partial)[1:]] == ["a", "b", "c"]
    rows.finish()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["predictions.csv"]
    assert lines_of(rows.whole)[0] == head
    assert [line[0] for line in lines_of(rows.whole)[1:]] == ["a", "b", "c"]


def test_what_an_earlier_run_left_half_done_is_replaced_by_the_first_row(tmp_path: Path) -> None:
    rows = PredictionFile(tmp_path)
    rows.partial.write_text("earlier")
    rows.whole.write_text("whole")
    assert rows.stop() == 0
    assert rows.partial.read_text() == "earlier"
    rows.add({0: A})
    assert rows.stop() == 1
    assert lines_of(rows.partial) == ["path,label,probability,entropy", "a,x,0.500000,0.250000"]
    assert rows.whole.read_text() == "whole"


def test_a_full_disk_leaves_whole_rows_and_is_named(tmp_path: Path) -> None:
    rows = PredictionFile(tmp_path)
    rows.add({0: A})
    before, limit = lines_of(rows.partial), resource.getrlimit(resource.RLIMIT_FSIZE)
    caught = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (rows.partial.stat().st_size + 5, limit[1]))
        with pytest.raises(
            DataError, match=r"predictions\.partial\.csv cannot be written \(.*free some disk"
        ):
            rows.add({1: B})
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
        assert rows.stop() == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, caught)
    assert lines_of(rows.partial) == before
    assert [path.name for path in tmp_path.iterdir()] == [rows.partial.name]


def test_the_file_keeps_odd_names(tmp_path: Path) -> None:
    lines = [Prediction('a,"b"\n.png', "klasse é", 0.25, 1.5), Prediction("c.png", "x", 1.0, 0.0)]
    write_predictions(tmp_path / "new" / "predictions.csv", lines)
    with (tmp_path / "new" / "predictions.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [
            ["path", "label", "probability", "entropy"],
            ['a,"b"\n.png', "klasse é", "0.250000", "1.500000"],
            ["c.png", "x", "1.000000", "0.000000"],
        ]


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "predictions.csv"
    path.write_text("old")

    def full(self: Path, target: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(DataError, match=r"predictions\.csv cannot be written \(No space left on device\)"):
        write_predictions(path, [Prediction("a", "b", 1.0, 0.0)])
    assert [item.name for item in tmp_path.iterdir()] == ["predictions.csv"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("method", ["soft", "tent", "cotta"])
def test_the_adapted_model_predicts_as_the_adapter_did(method: str, source: Trained, folder: Path) -> None:
    adapter = adapt(source, method, lr=1e-2, predict="own")
    result = predict_folder(adapter, source, folder, 3, seed=None)
    model = adapted(source, adapter, result.last).model
    names = [line.path for line in result.predictions[-3:]]
    x = torch.stack([torch.from_numpy(np.asarray(Image.open(folder / name)) / 255) for name in names])
    p = model(x.permute(0, 3, 1, 2).float()).softmax(-1).amax(-1)
    assert p.tolist() == pytest.approx([line.probability for line in result.predictions[-3:]], abs=1e-4)


def test_statistics_settle_on_a_batch_that_was_not_cut_short(source: Trained, folder: Path) -> None:
    result = predict_folder(adapt(source, "bn"), source, folder, 4, seed=None)
    names = [line.path for line in result.predictions]
    expected = torch.stack([torch.from_numpy(np.array(Image.open(folder / name))) for name in names[:4]])
    assert torch.equal(result.last.permute(0, 2, 3, 1), expected)


def test_the_adapted_model_has_the_adapter_s_weights(source: Trained, folder: Path) -> None:
    adapter = adapt(source, "soft", lr=1e-2)
    result = predict_folder(adapter, source, folder, 3)
    after = adapted(source, adapter, result.last)
    assert after.provenance == {"adapted_steps": 2}
    assert torch.equal(after.model.head.weight, adapter.model.head.weight)
    assert not torch.equal(after.model.head.weight, source.model.head.weight)
    assert "adapted_steps" not in source.provenance
