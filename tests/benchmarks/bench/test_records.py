"""Records through their file, and a file that is never another machine's."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from vicinal.benchmarks.bench.records import FILE, BenchRecord, Ledger, Place, as_line, from_line, read_bench
from vicinal.benchmarks.bench.scale import FULL
from vicinal.errors import ConfigError, DataError

HERE = Place("GPU", "full", "2.0")


def made(
    part: str = "goals", name: str = "a", group: str = "g", rounds: tuple[float, ...] = (3.0, 1.0, 2.0)
) -> BenchRecord:
    shape, facts = asdict(FULL.shape), {"extra": {"note": "n"}, "versions": {"torch": "2.0"}}
    return BenchRecord(part, group, name, "full", True, "GPU", shape, 140, rounds=rounds, **facts)  # type: ignore[arg-type]


def test_a_line_holds_the_whole_record_and_its_median() -> None:
    record = made()
    assert from_line(as_line(record)) == record
    assert json.loads(as_line(record))["seconds"] == 2.0


def test_a_case_that_failed_has_no_time() -> None:
    assert made(rounds=()).seconds is None


@pytest.mark.parametrize(
    ("arithmetic", "memory", "floor"), [(2.0, 1.0, 2.0), (1.0, 3.0, 3.0), (None, 1.0, None)]
)
def test_the_floor_is_the_larger_of_two(arithmetic: float | None, memory: float, floor: float | None) -> None:
    record = BenchRecord(
        "goals", "g", "a", "full", True, "GPU", {}, 1, floor_arithmetic=arithmetic, floor_memory=memory
    )
    assert record.floor == floor


def ledger(folder: Path, *parts: str, place: Place = HERE) -> Ledger:
    return Ledger(folder, parts, place)


def held(folder: Path) -> list[tuple[str, str, str]]:
    return [(record.part, record.group, record.name) for record in read_bench(folder)]


def test_groups_are_there_as_soon_as_they_are_made(tmp_path: Path) -> None:
    new = ledger(tmp_path / "new", "goals")
    assert read_bench(tmp_path / "new") == []
    for group in ("training", "loop"):
        new.replace([made(group=group, name=name) for name in ("a", "b")])
        assert held(tmp_path / "new")[-2:] == [("goals", group, "a"), ("goals", group, "b")]
    assert read_bench(tmp_path / "new") == new.records


def test_old_records_stay_until_new_ones_are_complete_and_keep_their_place(tmp_path: Path) -> None:
    first = ledger(tmp_path, "goals", "growth")
    for part, group in (("goals", "training"), ("growth", "adaptation"), ("goals", "adaptation")):
        first.replace([made(part, "old", group=group), made(part, "older", group=group)])
    old, again = held(tmp_path), ledger(tmp_path, "goals")
    assert held(tmp_path) == old
    again.replace([made("goals", "new", group="training")])
    assert held(tmp_path) == [("goals", "training", "new"), *old[2:]]
    again.replace([made("goals", "new", group="adaptation")])
    again.finish()
    assert held(tmp_path) == [("goals", "training", "new"), *old[2:4], ("goals", "adaptation", "new")]


def test_what_was_asked_for_and_is_not_measured_any_more_goes_at_the_end(tmp_path: Path) -> None:
    first = ledger(tmp_path, "goals", "growth")
    groups = (("goals", "training"), ("goals", "adaptation"), ("growth", "size"), ("growth", "given up"))
    for part, group in groups:
        first.replace([made(part, "old", group=group)])
    again = ledger(tmp_path, "growth", "adaptation")
    again.replace([made("growth", "new", group="size")])
    assert len(held(tmp_path)) == 4
    again.finish()
    assert held(tmp_path) == [("goals", "training", "old"), ("growth", "size", "new")]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = ledger(tmp_path, "goals")
    one.replace([made(name="old")])
    before = (tmp_path / FILE).read_bytes()

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            one.replace([made(name="new")])
    assert (tmp_path / FILE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("other", [("CPU", "full", "2.0"), ("GPU", "quick", "2.0"), ("GPU", "full", "2.1")])
def test_records_of_another_machine_are_not_touched(tmp_path: Path, other: tuple[str, str, str]) -> None:
    ledger(tmp_path, "goals").replace([made()])
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ConfigError, match="records of another run") as refused:
        ledger(tmp_path, "goals", place=Place(*other))
    assert "GPU, full, torch 2.0; this is {}, {}, torch {}".format(*other) in str(refused.value)
    assert (tmp_path / FILE).read_bytes() == before


def test_records_that_do_not_name_their_torch_are_of_another(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(as_line(replace(made(), versions={})) + "\n")
    with pytest.raises(ConfigError, match="torch unknown"):
        ledger(tmp_path, "goals")


def test_a_folder_without_records_has_none(tmp_path: Path) -> None:
    assert read_bench(tmp_path / "nowhere") == []


def test_a_last_line_that_is_cut_off_is_left_out_and_told(tmp_path: Path) -> None:
    told: list[str] = []
    path = tmp_path / FILE
    path.write_text(as_line(made(name="a")) + "\n" + as_line(made(name="b"))[:-20])
    assert [record.name for record in read_bench(tmp_path, told.append)] == ["a"]
    assert told == [f"{path}:2 is cut off: left out"]
    Ledger(tmp_path, ("growth",), HERE, told.append).replace([made("growth", "c")])
    assert [record.name for record in read_bench(tmp_path, told.append)] == ["a", "c"]
    assert len(told) == 2


def test_a_last_line_without_an_end_that_is_whole_counts(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / FILE).write_text(as_line(made(name="a")) + "\n\n" + as_line(made(name="b")))
    assert [record.name for record in read_bench(tmp_path, told.append)] == ["a", "b"]
    assert told == []


def broken(**changes: object) -> str:
    held = {**json.loads(as_line(made())), **changes}
    return json.dumps({name: value for name, value in held.items() if value != "left out"})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (as_line(made())[:40], "Expecting|Unterminated|delimiter"),
        ("7", "no object"),
        ("\xff", "Expecting|decode"),
        (broken(name="left out"), "no name"),
        (broken(rounds="abc"), "rounds is 'abc'"),
        (broken(rounds=[1.0, "x"]), "rounds is"),
        (broken(judged=1), "judged is 1"),
        (broken(peak_bytes=1.5), "peak_bytes is 1.5"),
        (broken(versions={"torch": 2}), "versions is"),
        (broken(part="other"), "part is 'other'"),
        (broken(shape={"backbone": "small"}), "no batch, classes, domains, size, stream_batch"),
        (broken(part="profile"), "no kinds, total"),
    ],
)
@pytest.mark.parametrize("place", [1, 2])
def test_any_other_line_that_cannot_be_read_is_named(tmp_path: Path, line: str, why: str, place: int) -> None:
    lines = [as_line(made()), as_line(made()), as_line(made())]
    lines[place] = line
    (tmp_path / FILE).write_bytes("".join(one + "\n" for one in lines).encode("latin-1"))
    with pytest.raises(DataError, match=why) as refused:
        read_bench(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / FILE}:{place + 1} is no record of vicinal bench")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is a file: --out takes a folder"):
        read_bench(tmp_path / "file")
