import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from vicinal.adapters.methods import METHODS, adapt, servable
from vicinal.checkpoint import load, save
from vicinal.data.load import load_dataset
from vicinal.evaluation.record import Record, read_records
from vicinal.report.tables import labels, summarise
from vicinal.versions import made_by

CPU = ("--device", "cpu")


def test_records_hold_every_field_and_are_appended(vicinal: Any, model: Path, shared_domains: Path) -> None:
    for count in (2, 4):
        ran = vicinal("evaluate", model, "--methods", "erm,soft", "--batch-size", 6, *CPU)
        assert ran.code == 0, ran.err
        lines = (model / "records.jsonl").read_text().splitlines()
        assert len(lines) == count
    fields = {field.name for field in dataclasses.fields(Record)}
    assert all(json.loads(line).keys() == fields for line in lines)
    erm, soft = read_records(model / "records.jsonl")[:2]
    assert (erm.method, soft.method) == ("erm", "soft")
    assert (erm.statistics, soft.statistics) == ("source", "batch")
    assert (erm.dataset, erm.target, erm.backbone, erm.algorithm) == ("shades", "light", "small", "meta")
    assert (erm.stream, erm.batch_size, erm.seed, len(erm.curve)) == ("online", 6, 0, 4)
    assert erm.versions == made_by()
    assert erm.protocol["training"]["train"]["iterations"] == 6
    assert erm.protocol["provenance"]["targets"] == ["light"]
    assert soft.protocol["adapter"]["lr"] > 0
    assert soft.protocol["images"] == 20
    rows = summarise([erm, soft])
    assert all(name in ran.out for name in labels(row.setup for row in rows).values())


@pytest.mark.parametrize("method", ["erm", "soft", "vnl"])
def test_the_accuracy_is_that_of_an_adapter_run_by_hand(
    vicinal: Any, model: Path, shared_domains: Path, method: str
) -> None:
    assert vicinal("evaluate", model, "--methods", method, "--seed", 3, "--batch-size", 8, *CPU).code == 0
    record = read_records(model / "records.jsonl")[0]
    domain = load_dataset(str(shared_domains), 16, 3).domains["light"]
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    adapter = adapt(load(model), method, seed=3)
    batches = (domain.images[order].float() / 255).split(8)
    p = torch.cat([adapter(x).softmax(-1) for x in batches])
    truth = domain.labels[order]
    right = (p.argmax(-1) == truth).double()
    assert record.accuracy == pytest.approx(right.mean().item(), abs=1e-6)
    assert record.nll == pytest.approx(-p[range(20), truth].log().mean().item(), abs=1e-5)
    assert record.curve == pytest.approx([right[:end].mean().item() for end in (8, 16, 20)], abs=1e-6)


def test_options_of_a_method_are_on_record(vicinal: Any, model: Path) -> None:
    asked = {"predict": "neighbors", "rounds": 3, "joint": True, "agreement": 0.5}
    words = [word for name, value in asked.items() for word in ("--option", f"{name}={json.dumps(value)}")]
    ran = vicinal("evaluate", model, "--methods", "vnl", *(word.replace('"', "") for word in words), *CPU)
    assert ran.code == 0, ran.err
    (record,) = read_records(model / "records.jsonl")
    assert record.protocol["adapter"].items() >= asked.items()
    assert record.predict == "neighbors"


@pytest.mark.parametrize("yes", ["True", "true"])
def test_options_may_be_written_as_python_does(vicinal: Any, model: Path, yes: str) -> None:
    asked = ("--option", "predict=neighbors", "--option", f"joint={yes}", "--option", "horizon=None")
    ran = vicinal("evaluate", model, "--methods", "vnl", *asked, *CPU)
    assert ran.code == 0, ran.err
    (record,) = read_records(model / "records.jsonl")
    assert record.protocol["adapter"]["joint"] is True
    assert record.protocol["adapter"]["horizon"] is None


def test_a_method_named_twice_is_measured_once(vicinal: Any, model: Path) -> None:
    ran = vicinal("evaluate", model, "--methods", "erm, bn,erm", *CPU)
    assert ran.code == 0, ran.err
    assert [record.method for record in read_records(model / "records.jsonl")] == ["erm", "bn"]


def test_data_that_moved_since_training(vicinal: Any, domains: Path, models: dict[str, Path]) -> None:
    trained = load(models["erm"])
    trained.provenance["dataset"] = str(domains.parent / "gone")
    save(domains.parent / "run" / "model.safetensors", trained)
    line = vicinal("evaluate", "run", "--methods", "erm", *CPU).line
    assert f"no longer at '{domains.parent / 'gone'}'" in line
    assert "--data" in line
    assert vicinal("evaluate", "run", "--methods", "erm", "--data", domains, *CPU).code == 0


def test_a_target_called_like_a_source_is_named_wherever_the_data_lie(
    vicinal: Any, model: Path, domains: Path, shared_domains: Path
) -> None:
    seen = "figures are not those of a domain it never saw"
    words = ("--methods", "erm", "--target", "dark", *CPU)
    ran = vicinal("evaluate", model, "--data", domains, *words)
    assert f"the model was trained on a domain 'dark': if it is this one, its {seen}" in ran.out
    beside = os.path.relpath(shared_domains)
    ran = vicinal("evaluate", model, "--data", beside, *words)
    assert f"the model was trained on 'dark': its {seen}" in ran.out
    ran = vicinal("evaluate", model, "--data", domains, "--methods", "erm", "--target", "light", *CPU)
    assert "was trained on" not in ran.out


def test_draws_of_a_label_shift_are_different_streams(vicinal: Any, model: Path) -> None:
    words = ("--stream", "label_shift", "--alpha", 0.5, "--draws", 3, "--methods", "erm", "--batch-size", 4)
    assert vicinal("evaluate", model, *words, *CPU).code == 0
    records = read_records(model / "records.jsonl")
    assert [record.seed for record in records] == [0, 1, 2]
    assert all(record.stream == "label_shift" for record in records)
    assert all(record.protocol["alpha"] == 0.5 for record in records)
    assert len({(record.protocol["images"], record.nll) for record in records}) == 3


@pytest.mark.parametrize(
    ("algorithm", "own"), [("erm", set()), ("neighbor", {"neighbor"}), ("meta", {"vnl_paper"})]
)
def test_all_methods(vicinal: Any, models: dict[str, Path], tmp_path: Path, algorithm: str, own: Any) -> None:
    run = models[algorithm]
    assert vicinal("evaluate", run, "--methods", "all", "--out", "all", *CPU).code == 0
    found = [record.method for record in read_records(tmp_path / "all" / "records.jsonl")]
    assert len(set(found)) == len(found)
    assert {"erm", "bn", "hard", "soft", "probabilistic", "vnl"} | own <= set(found)
    assert set(found) == set(servable(load(run))) <= set(METHODS)


def test_all_methods_of_the_digits(vicinal: Any, digits_model: Path, tmp_path: Path) -> None:
    words = ("--methods", "erm,bn", "--batch-size", 100, "--out", "out")
    assert vicinal("evaluate", digits_model, *words, *CPU).code == 0
    records = read_records(tmp_path / "out" / "records.jsonl")
    assert [(r.target, r.method) for r in records] == [
        ("0", "erm"), ("0", "bn"), ("90", "erm"), ("90", "bn"),
    ]  # fmt: skip
    assert all(record.protocol["images"] == 697 for record in records)


def test_bad_images_are_left_out(vicinal: Any, model: Path, domains: Path) -> None:
    (domains / "light" / "left" / "3.png").write_bytes(b"text")
    ran = vicinal("evaluate", model, "--data", domains, "--methods", "erm", "--skip-bad", *CPU)
    assert ran.code == 0, ran.err
    assert read_records(model / "records.jsonl")[0].protocol["images"] == 19


def test_left_out_images_are_listed(vicinal: Any, model: Path, domains: Path) -> None:
    (domains / "light" / "left" / "3.png").write_bytes(b"text")
    ran = vicinal("evaluate", model, "--data", domains, "--methods", "erm", "--skip-bad", *CPU)
    assert "1 unreadable images" in ran.out


def test_every_domain_can_be_evaluated_at_once(vicinal: Any, model: Path) -> None:
    targets = [word for name in ("dark", "dim", "light", "mid") for word in ("--target", name)]
    assert vicinal("evaluate", model, "--methods", "erm", *targets, *CPU).code == 0
