import fcntl
import gzip
import json
import math
import multiprocessing
import re
import threading
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vicinal.errors import DataError
from vicinal.evaluation.record import Record, append_record, read_records
from vicinal.versions import versions

RECORD = Record(
    dataset="digits",
    target="90",
    backbone="cnn",
    algorithm="erm",
    method="tent",
    statistics="batch",
    predict="own",
    stream="online",
    seed=0,
    batch_size=20,
    accuracy=0.5,
    ece=0.25,
    nll=1.5,
    brier=0.75,
    curve=[0.25, 0.5],
    seconds=2.0,
    images_per_second=20.0,
    reliability={"count": [1.0, 3.0], "confidence": [0.2, 0.9], "accuracy": [0.0, 1.0]},
    protocol={"step_size": 1e-4, "nested": {"steps": [1, 2]}, "note": None},
    versions={"torch": "2.6"},
)


def test_json_is_one_line_with_sorted_keys() -> None:
    line = RECORD.to_json()
    assert "\n" not in line
    assert list(json.loads(line)) == sorted(asdict(RECORD))
    assert Record.from_json(line) == RECORD


@settings(max_examples=50)
@given(
    accuracy=st.floats(allow_nan=False, allow_infinity=False),
    curve=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5),
    target=st.text(max_size=20),
    seed=st.integers(),
)
def test_what_is_written_is_what_is_read(accuracy: float, curve: list[float], target: str, seed: int) -> None:
    record = replace(RECORD, accuracy=accuracy, curve=curve, target=target, seed=seed)
    assert Record.from_json(record.to_json()) == record


def test_not_finite_is_null_in_the_file_and_nan_in_the_record() -> None:
    line = replace(
        RECORD, nll=math.nan, ece=math.inf, curve=[0.5, math.nan], protocol={"x": [math.nan]}
    ).to_json()
    values = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (values["nll"], values["ece"], values["curve"]) == (None, None, [0.5, None])
    back = Record.from_json(line)
    assert math.isnan(back.nll)
    assert math.isnan(back.ece)
    assert back.curve[0] == 0.5
    assert math.isnan(back.curve[1])
    assert back.protocol == {"x": [None]}


def test_an_integer_among_the_measurements_reads_as_a_float() -> None:
    values = asdict(RECORD) | {"accuracy": 1}
    assert isinstance(Record.from_json(json.dumps(values)).accuracy, float)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": "0"}, "'seed'"),
        ({"seed": True}, "'seed'"),
        ({"target": 90}, "'target'"),
        ({"accuracy": "high"}, "'accuracy'"),
        ({"curve": 0.5}, "'curve'"),
        ({"reliability": {"count": 3}}, "'reliability'"),
        ({"protocol": []}, "'protocol'"),
        ({"extra": 1}, r"unknown fields \['extra'\]"),
    ],
)
def test_a_foreign_value_is_an_error(change: dict[str, object], says: str) -> None:
    with pytest.raises(DataError, match=says):
        Record.from_json(json.dumps(asdict(RECORD) | change))


@pytest.mark.parametrize("line", ["", "[]", "3", "{}", "{", "null"])
def test_a_foreign_line_is_an_error(line: str) -> None:
    with pytest.raises(DataError, match="not a record"):
        Record.from_json(line)


def test_records_are_read_in_the_order_of_writing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    written = [replace(RECORD, seed=seed, target="ä\n") for seed in range(3)]
    for record in written:
        append_record(path, record)
    assert read_records(path) == written
    assert path.read_bytes().count(b"\n") == 3


def test_a_torn_last_line_is_skipped_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_record(path, RECORD)
    path.write_bytes(path.read_bytes() + RECORD.to_json().encode()[:100])
    with pytest.warns(UserWarning, match=r"line 2"):
        assert read_records(path) == [RECORD]


def test_appending_after_a_torn_line_spoils_nothing(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_record(path, RECORD)
    path.write_bytes(path.read_bytes() + b'{"target": "\xc3')
    with pytest.warns(UserWarning, match="torn"):
        append_record(path, replace(RECORD, seed=1))
    assert [record.seed for record in read_records(path)] == [0, 1]


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(RECORD.to_json())
    assert read_records(path) == [RECORD]
    append_record(path, replace(RECORD, seed=1))
    assert [record.seed for record in read_records(path)] == [0, 1]


@pytest.mark.parametrize("bad", [b"{", b"\xff\xfe", b'{"a": 1}'])
def test_any_other_bad_line_is_an_error_with_its_number(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "records.jsonl"
    good = RECORD.to_json().encode()
    path.write_bytes(b"\n".join([good, b"", bad, good, b""]))
    with pytest.raises(DataError, match=re.escape(f"{path}, line 3")):
        read_records(path)
    path.write_bytes(b"\n".join([good, bad, b""]))
    with pytest.raises(DataError, match="line 2"):
        read_records(path)


def test_no_file_is_an_error_an_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    assert read_records(tmp_path / "empty.jsonl") == []


def _append_many(path: Path, seed: int) -> None:
    for _ in range(10):
        append_record(path, replace(RECORD, seed=seed, curve=[0.5] * 5000))


def test_writers_in_parallel_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    workers = [
        multiprocessing.get_context("fork").Process(target=_append_many, args=(path, seed))
        for seed in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(record.seed for record in read_records(path)) == [0] * 10 + [1] * 10 + [2] * 10


def test_a_writer_waits_for_the_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    writer = threading.Thread(target=append_record, args=(path, RECORD))
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        writer.start()
        writer.join(timeout=0.1)
        assert path.read_bytes() == b""
    writer.join(timeout=5)
    assert read_records(path) == [RECORD]


def test_versions_name_what_a_result_depends_on() -> None:
    names = list(versions())
    assert names[:5] == ["python", "torch", "torchvision", "timm", "vicinal"]
    assert names[5:] == (["numba"] if find_spec("numba") else [])
    assert all(re.match(r"\d+\.\d+", version) for version in versions().values())


def test_records_that_gzip_packed_are_read(tmp_path: Path) -> None:
    lines = "".join(replace(RECORD, seed=seed).to_json() + "\n" for seed in range(3))
    path = tmp_path / "records.jsonl.gz"
    path.write_bytes(gzip.compress(lines.encode()))
    assert [record.seed for record in read_records(path)] == [0, 1, 2]


@pytest.mark.parametrize("damage", ["cut", "foreign", "flipped", "empty"])
def test_a_damaged_gzip_file_is_one_line(tmp_path: Path, damage: str) -> None:
    whole = gzip.compress((RECORD.to_json() + "\n").encode())
    flipped = whole[:40] + bytes([whole[40] ^ 255]) + whole[41:]
    path = tmp_path / "records.jsonl.gz"
    path.write_bytes({"cut": whole[:-20], "foreign": b"text", "flipped": flipped, "empty": b""}[damage])
    with pytest.raises(DataError, match=f"{re.escape(str(path))}: not a whole gzip file"):
        read_records(path)
