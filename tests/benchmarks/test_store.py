"""Records of a benchmark on disk: once each, whole or not at all, whoever writes and whenever it ends."""

import gzip
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vicinal.benchmarks.plan import key_of
from vicinal.benchmarks.store import Store
from vicinal.errors import DataError
from vicinal.evaluation.record import Record, append_record, read_records

TRAINING = {"data": "digits", "training": {"iterations": 3}}


def record(seed: int = 0, target: str = "90", **changes: Any) -> Record:
    about = {
        "model": key_of(TRAINING),
        "training": TRAINING,
        "method": "soft",
        "stream": "online",
        "batch_size": 20,
        "seed": seed,
    }
    benchmark = {
        "spec": "made",
        "setting": "digits",
        "row": "Soft",
        "key": key_of(about),
        "model": key_of(TRAINING),
        "quick": False,
        "about": about,
    }
    values: dict[str, Any] = {
        "dataset": "digits",
        "target": target,
        "backbone": "small",
        "algorithm": "erm",
        "method": "soft",
        "statistics": "batch",
        "predict": "own",
        "stream": "online",
        "seed": seed,
        "batch_size": 20,
        "accuracy": 0.5,
        "ece": 0.1,
        "nll": 1.0,
        "brier": 0.5,
        "curve": [0.5, 0.5],
        "seconds": 1.0,
        "images_per_second": 10.0,
        "reliability": {"counts": [1.0]},
        "protocol": {"benchmark": benchmark},
        "versions": {"vicinal": "0"},
    }
    return Record(**{**values, **changes})


def key(one: Record) -> str:
    return str(one.protocol["benchmark"]["key"])


def test_what_is_appended_comes_back_in_order(tmp_path: Path) -> None:
    store = Store(tmp_path / "new")
    assert store.records() == []
    assert store.done() == set()
    made = [record(0), record(0, "0"), record(1)]
    assert [store.append(one) for one in made] == [True, True, True]
    assert store.records() == Store(tmp_path / "new").records() == made
    assert store.done() == {(key(made[0]), "90"), (key(made[0]), "0"), (key(made[2]), "90")}


def test_a_second_record_of_key_and_target_is_ignored(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = record()
    assert store.append(first)
    assert not store.append(replace(first, accuracy=0.9, seconds=9.0))
    assert not Store(tmp_path).append(replace(first, accuracy=0.9))
    assert store.records() == [first]


def test_it_sees_what_others_wrote_since(tmp_path: Path) -> None:
    one, other = Store(tmp_path), Store(tmp_path)
    assert one.append(record(0))
    assert other.append(record(1))
    assert not one.append(record(1))
    assert one.done() == other.done()
    assert len(one.records()) == 2


def write_many(folder: Path, seeds: list[int], barrier: Any) -> None:
    store = Store(folder)
    barrier.wait()
    for seed in seeds:
        store.append(record(seed, curve=[0.1] * 2000))


def test_several_writers_at_once_lose_and_double_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    # Every seed is written by two of the four.
    shares = [list(range(0, 40)), list(range(20, 60)), list(range(40, 80)), [*range(60, 80), *range(0, 20)]]
    writers = [context.Process(target=write_many, args=(tmp_path, share, barrier)) for share in shares]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert sorted(one.seed for one in Store(tmp_path).records()) == list(range(80))


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_torn_last_line_is_no_record_and_is_repaired(tmp_path: Path, share: float) -> None:
    store = Store(tmp_path)
    store.append(record(0))
    line = record(1).to_json().encode()
    with store.path.open("ab") as file:
        file.write(line[: int(share * len(line))])
    again = Store(tmp_path)
    assert again.records() == [record(0)]
    assert again.done() == {(key(record(0)), "90")}
    assert again.append(record(1))
    assert Store(tmp_path).records() == [record(0), record(1)]
    assert len(store.path.read_bytes().splitlines()) == 2


def test_a_whole_last_line_without_its_end_is_a_record(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(record(0))
    store.path.write_bytes(store.path.read_bytes() + record(1).to_json().encode())
    again = Store(tmp_path)
    assert again.records() == [record(0), record(1)]
    assert not again.append(record(1))
    assert again.append(record(2))
    assert [one.seed for one in Store(tmp_path).records()] == [0, 1, 2]


def test_a_file_that_was_put_in_its_place_is_read_anew(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(record(0))
    store.append(record(1))
    store.path.unlink()
    assert store.append(record(1))
    assert store.records() == [record(1)]
    assert store.done() == {(key(record(1)), "90")}


def edited(change: dict[str, Any], **fields: Any) -> Record:
    """Return a record whose benchmark part was changed by hand."""
    one = record(1, **fields)
    return replace(one, protocol={"benchmark": {**one.protocol["benchmark"], **change}})


ABOUT = record(1).protocol["benchmark"]["about"]
WRONG = {
    "another key": (edited({"key": "0" * 16}), "its key '0000000000000000' does not match its protocol"),
    "another description": (edited({"about": {**ABOUT, "lr": 1}}), "does not match its protocol"),
    "another method": (edited({}, method="hard"), "does not match its protocol"),
    "another batch size": (edited({}, batch_size=3), "does not match its protocol"),
    "another model": (edited({"model": "1" * 16}), "does not match its protocol"),
    "no description": (edited({"about": None}), "does not match its protocol"),
    "not a benchmark's": (record(1, protocol={}), "not a record of a benchmark"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_line_whose_key_is_not_its_protocols_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    wrong, said = WRONG[name]
    store = Store(tmp_path)
    with pytest.raises(DataError, match=said):
        store.append(wrong)
    store.append(record(0))
    append_record(store.path, wrong)  # as an editor would
    append_record(store.path, record(2))
    for read in (store.records, store.done, Store(tmp_path).done, lambda: store.append(record(3))):
        with pytest.raises(DataError, match=said) as error:
            read()
        assert f"{store.path}, line 2: " in str(error.value)


def test_a_model_that_is_not_its_descriptions(tmp_path: Path) -> None:
    about = {**ABOUT, "training": {"data": "other"}}
    with pytest.raises(DataError, match=r"its model .* does not match its protocol"):
        Store(tmp_path).append(edited({"about": about, "key": key_of(about)}))


def test_a_line_that_is_no_record_is_named_too(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(record(0))
    with store.path.open("a") as file:
        file.write(json.dumps({"a": 1}) + "\n")
    store.path.write_bytes(store.path.read_bytes() + record(1).to_json().encode() + b"\n")
    with pytest.raises(DataError, match="line 2: not a record"):
        store.records()


def pack(store: Store) -> None:
    """Do what `gzip records.jsonl` does."""
    store.packed.write_bytes(gzip.compress(store.path.read_bytes()))
    store.path.unlink()


def test_packed_records_are_there_and_not_made_again(tmp_path: Path) -> None:
    before = Store(tmp_path)
    before.append(record(0))
    before.append(record(1))
    pack(before)
    store = Store(tmp_path)
    assert store.done() == {(one.protocol["benchmark"]["key"], "90") for one in (record(0), record(1))}
    assert [one.seed for one in store.records()] == [0, 1]
    assert store.packed.exists(), "looking changes nothing"


def test_the_first_new_record_unpacks_those_before(tmp_path: Path) -> None:
    before = Store(tmp_path)
    before.append(record(0))
    before.append(record(1))
    pack(before)
    store, other = Store(tmp_path), Store(tmp_path)
    assert len(other.done()) == 2
    assert not store.append(record(0))
    assert store.append(record(2))
    assert [one.seed for one in read_records(store.path)] == [0, 1, 2]
    assert not store.packed.exists()
    assert len(other.done()) == 3, "whoever looked before sees them all"
    assert not other.append(record(1))


def test_records_packed_while_somebody_writes_are_not_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(record(0))
    store.append(record(1))
    pack(store)
    assert len(store.done()) == 2
    assert not store.append(record(0))


def test_records_that_were_packed_and_kept_count_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(record(0))
    lines = store.path.read_bytes()
    pack(store)
    store.path.write_bytes(lines)
    assert [one.seed for one in Store(tmp_path).records()] == [0]
    Store(tmp_path).append(record(1))
    assert [one.seed for one in read_records(store.path)] == [0, 1]


def test_records_that_are_gone_are_not_done(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(record(0))
    store.path.unlink()
    assert store.done() == set()
    assert store.append(record(0))


def test_a_packed_record_of_another_protocol_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    append_record(store.path, replace(record(0), method="hard"))
    pack(store)
    with pytest.raises(DataError, match=r"records\.jsonl\.gz, line 1: its key"):
        Store(tmp_path).done()
