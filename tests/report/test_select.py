import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from vicinal.errors import ConfigError, DataError
from vicinal.evaluation.record import Record
from vicinal.report.select import facets, read_all, record_files, where

MakeRecord = Callable[..., Record]
PROTOCOL = {
    "adapter": {"lr": 1e-3, "predict": "other", "steps": 1, "statistics": {"kind": "x", "floor": 0.05}},
    "benchmark": {"spec": "rotated", "setting": "MNIST, small", "row": "ERM", "quick": False},
    "training": {"train": {"iterations": 200, "layers": [1, 2]}},
    "alpha": 0.5,
    "note": None,
}


def write(path: Path, *records: Record) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(record.to_json() + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_a_record_is_called_by_fields_options_benchmark_and_paths(make: MakeRecord) -> None:
    found = facets(make(protocol=PROTOCOL))
    assert found["method"] == "none"
    assert (found["lr"], found["steps"], found["statistics.floor"]) == (1e-3, 1, 0.05)
    assert (found["spec"], found["setting"], found["row"]) == ("rotated", "MNIST, small", "ERM")
    assert (found["training.train.iterations"], found["training.train.layers"]) == (200, "1,2")
    assert (found["alpha"], found["note"]) == (0.5, None)
    # A field of the record comes before an option of the same name.
    assert found["predict"] == "own"
    assert found["statistics"] == "source"


def test_a_folder_stands_for_its_file_else_for_those_below(tmp_path: Path, make: MakeRecord) -> None:
    one = write(tmp_path / "b" / "records.jsonl", make(seed=1))
    two = write(tmp_path / "a" / "deep" / "records.jsonl.gz", make(seed=2))
    (tmp_path / "b" / "other.jsonl").write_text("not a record")
    assert record_files(one.parent) == [one]
    assert record_files(tmp_path) == [two, one]
    assert record_files(one) == [one]
    assert [record.seed for record in read_all([tmp_path, one, two.parent])] == [2, 1]
    more = [write(tmp_path / "c" / name / "records.jsonl", make()) for name in "gfedcba"]
    assert record_files(tmp_path / "c") == more[::-1]


def test_two_files_in_one_folder_are_not_guessed_about(tmp_path: Path, make: MakeRecord) -> None:
    for name in ("records.jsonl", "records.jsonl.gz"):
        write(tmp_path / name, make())
    with pytest.raises(DataError, match=r"holds both records\.jsonl and records\.jsonl\.gz: name the file"):
        read_all([tmp_path])
    assert len(read_all([tmp_path / "records.jsonl.gz"])) == 1


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither records\.jsonl nor records\.jsonl\.gz"):
        read_all([tmp_path])
    with pytest.raises(DataError, match=r"in this folder or below: it is empty"):
        read_all([tmp_path])
    for name in ("model.safetensors", "a", "b", "c", "d", "e", ".hidden"):
        (tmp_path / name).touch()
    held = "it holds a, b, c, d, e and 1 more; vicinal evaluate .* makes records of its model"
    with pytest.raises(DataError, match=held):
        read_all([tmp_path])
    with pytest.raises(DataError, match="no such file of records"):
        read_all([tmp_path / "gone.jsonl"])
    (tmp_path / "records.jsonl").touch()
    with pytest.raises(DataError, match="no records there yet"):
        read_all([tmp_path])


def test_filters_are_all_needed_and_each_allows_several_values(make: MakeRecord) -> None:
    records = [make(method=m, seed=s) for m in ("vnl", "soft", "erm") for s in range(3)]
    kept = where(records, {"method": ["vnl,soft"], "seed": ["0", "2"]})
    assert [(r.method, r.seed) for r in kept] == [("vnl", 0), ("vnl", 2), ("soft", 0), ("soft", 2)]
    assert where(records, {}) == records


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("lr", "0.001", 1),
        ("lr", "1e-3", 1),
        ("lr", "1e-3,0.5", 2),
        ("seed", "7", 1),
        ("quick", "false", 1),
        ("quick", "true", 1),
        ("note", "none", 1),
        ("training.train.iterations", "200", 1),
        ("setting", "MNIST, small", 1),
        ("row", "ERM,Ours", 2),
    ],
)
def test_values_are_compared_as_what_they_are(make: MakeRecord, name: str, text: str, kept: int) -> None:
    other = {
        "adapter": {"lr": 0.5},
        "benchmark": {"setting": "plain", "row": "Ours", "quick": True},
        "note": "x",
        "training": {"train": {"iterations": 400}},
    }
    records = [make(protocol=PROTOCOL, seed=7), make(protocol=other, seed=8)]
    assert len(where(records, {name: [text]})) == kept


def test_values_with_commas_are_given_one_by_one(make: MakeRecord) -> None:
    records = [make(target="a,b"), make(target="c"), make(target="d")]
    assert [r.target for r in where(records, {"target": ["a,b", "c"]})] == ["a,b", "c"]


def test_an_unknown_name_lists_those_that_are_known(make: MakeRecord) -> None:
    with pytest.raises(ConfigError) as caught:
        where([make(protocol=PROTOCOL)], {"methud": ["vnl"]})
    line = str(caught.value)
    assert line.startswith("unknown field 'methud': choose from dataset, target, ")
    assert all(f" {name}" in line for name in ("method", "stream", "lr", "setting", "alpha"))
    assert line.endswith("or a path of the protocol such as training.train.iterations")


def test_an_unknown_value_lists_those_that_are_there(make: MakeRecord) -> None:
    records = [make(method="vnl"), make(method="soft")]
    with pytest.raises(ConfigError, match="no record has method 'vnk': choose from soft, vnl"):
        where(records, {"method": ["soft,vnk"]})


def test_filters_that_leave_nothing_are_an_error(make: MakeRecord) -> None:
    records = [make(method="vnl", seed=0), make(method="soft", seed=1)]
    with pytest.raises(ConfigError, match="none of the 2 records has method=vnl and seed=1"):
        where(records, {"method": ["vnl"], "seed": ["1"]})
