"""Records of `vicinal bench` as rows of text: what was measured, against what, and what goals make of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from vicinal.benchmarks.bench.goals import DOUBLE, GOALS, UNROLLED, Judged, judge, of_group
from vicinal.benchmarks.bench.profiling import WAITING
from vicinal.benchmarks.bench.records import SECTIONS, BenchRecord
from vicinal.benchmarks.bench.timing import ratio

HEADINGS = ("What", "Time", "Against", "Goal", "Floor", "Times floor", "Peak memory")
SHORT = {"bfloat16": "bf16", "float32": "fp32"}  # as people write them


@dataclass(frozen=True)
class Row:
    """One line of the table, in the order of its headings."""

    what: str
    time: str = ""
    against: str = ""
    goal: str = ""
    floor: str = ""
    times_floor: str = ""
    memory: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts of the row."""
        return self.what, self.time, self.against, self.goal, self.floor, self.times_floor, self.memory


def duration(seconds: float | None) -> str:
    """Return a time in the unit that suits it."""
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def size(count: int | None) -> str:
    """Return bytes in the unit that suits them."""
    if count is None:
        return ""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def sections(records: Sequence[BenchRecord]) -> list[tuple[str, list[Row]]]:
    """Return the whole table: a heading and its rows for each group of cases, then growth."""
    judged = judge(records)
    made = []
    for group in SECTIONS:
        members = of_group(records, group)
        mine = {item.goal.subject: item for item in judged if item.goal.group == group}
        if members:
            rows = [case_row(record, mine.get(record.name), members) for record in members]
            made.append((_heading(members[0]), rows))
    growth = growth_rows(records)
    return [*made, ("how cost grows", growth)] if growth else made


def _heading(record: BenchRecord) -> str:
    shape, images = record.shape, record.images
    told = {
        "loop": f"the training loop, {images} images an iteration",
        "stream": f"online adaptation, batches of {shape['stream_batch']}",
    }.get(record.group, f"one step on {images} images")
    return f"{told}, {shape['backbone']}, {shape['size']} px, {shape['classes']} classes"


def case_row(record: BenchRecord, judged: Judged | None, group: Sequence[BenchRecord]) -> Row:
    """Return what was found of one case."""
    precision = SHORT.get(record.precision, record.precision)
    name = f"{record.name} ({precision})" if precision else record.name
    if record.error:
        return Row(name, f"failed: {record.error}")
    floor = record.floor
    times = "" if floor is None or record.seconds is None else f"{record.seconds / floor:.1f}x"
    return Row(
        name,
        duration(record.seconds),
        _against(record, judged, group),
        "" if judged is None else goal_text(judged),
        duration(floor),
        times,
        size(record.peak_bytes),
    )


def _against(record: BenchRecord, judged: Judged | None, group: Sequence[BenchRecord]) -> str:
    if judged is not None and judged.against:
        return held_against(judged)
    if judged is not None and judged.goal.note:
        return judged.goal.note
    plain = next((one for one in group if one.name == UNROLLED and one.rounds), None)
    if record.name == DOUBLE and plain is not None:
        return f"{ratio(record.rounds, plain.rounds):.2f}x {plain.name}"
    return ""


def goal_text(judged: Judged) -> str:
    """Return what was asked and whether it was reached."""
    return f"at most {_limit(judged)}: {judged.verdict}"


def held_against(judged: Judged) -> str:
    """Return a ratio with what it is to, and how far the rounds lie apart."""
    rounds = "" if judged.spread is None else " ({:.3f} to {:.3f})".format(*judged.spread)
    return f"{_times(judged)} {judged.against}{rounds}"


def _times(judged: Judged) -> str:
    """Return a ratio with as many digits as it takes to see on which side of the limit it lies."""
    assert judged.figure is not None
    # Beside its rounds, with as many digits as they have: else it may seem to lie outside of them.
    enough = (2, 3, 4) if judged.spread is None else (3, 4)
    told = (f"{judged.figure:.{digits}f}" for digits in enough)
    apart = (text for text in told if judged.verdict != "missed" or float(text) > judged.goal.limit)
    return f"{next(apart, f'{judged.figure:g}')}x"


def _limit(judged: Judged) -> str:
    return f"{judged.goal.limit:g}x" if judged.goal.unit == "x" else duration(judged.goal.limit)


def goal_line(judged: Judged) -> str:
    """Return a goal with its figure as a sentence."""
    where = {"deeper": ", deeper net"}.get(judged.goal.group, "")
    found = duration(judged.figure)
    if judged.figure is not None and judged.against:
        found = held_against(judged)
    told = "; ".join(part for part in (found, f"asked: at most {_limit(judged)}", judged.why) if part)
    return f"{judged.verdict}: {judged.goal.subject}{where}: {told}"


def memory_line(records: Sequence[BenchRecord]) -> str:
    """Return the peak memory of the steps that the goals speak of, as a sentence."""
    wanted = {(goal.group, goal.subject) for goal in GOALS}
    told = [
        f"{record.name}{', deeper net' if record.group == 'deeper' else ''} {size(record.peak_bytes)}"
        for record in records
        if (record.group, record.name) in wanted and record.peak_bytes is not None
    ]
    return f"peak memory: {', '.join(told) or 'not stated, it is measured on a GPU alone'}"


def growth_groups(records: Sequence[BenchRecord]) -> dict[str, list[BenchRecord]]:
    """Return the records of each series, in the order they were measured."""
    groups: dict[str, list[BenchRecord]] = {}
    for record in records:
        if record.part == "growth":
            groups.setdefault(record.group, []).append(record)
    return groups


def growth_rows(records: Sequence[BenchRecord]) -> list[Row]:
    """Return a line for each series: times, ratios to its first, memory."""
    return [_growth_row(group, members) for group, members in growth_groups(records).items()]


def _growth_row(group: str, members: Sequence[BenchRecord]) -> Row:
    axis, _, subject = group.partition(": ")
    what = f"{subject}: {axis} {', '.join(record.name for record in members)}"
    if axis == "backbone":
        millions = ", ".join(f"{record.parameters / 1e6:.1f}" for record in members)
        what = f"{subject}: {millions} million parameters ({', '.join(r.name for r in members)})"
    first = members[0]
    ratios = [
        f"{ratio(record.rounds, first.rounds):.2f}x" if record.rounds and first.rounds else "failed"
        for record in members
    ]
    models = [str(record.extra["left_out_models"]) for record in members if "left_out_models" in record.extra]
    more = f"; left-out models {', '.join(models)}" if models else ""
    failed = [f"failed at {record.name}: {record.error}" for record in members if record.error]
    times = ", ".join(duration(record.seconds) or "-" for record in members)
    memory = ", ".join(size(record.peak_bytes) for record in members if record.peak_bytes is not None)
    return Row(what, "; ".join([times, *failed]), f"{', '.join(ratios)} the first{more}", memory=memory)


def profile_lines(records: Sequence[BenchRecord]) -> list[str]:
    """Return where the time of each profiled step goes, the largest part first."""
    floors = {r.name: r for r in records if r.part == "goals" and r.group in ("training", "adaptation")}
    return [_profile_line(record, floors.get(record.name)) for record in records if record.part == "profile"]


def _profile_line(record: BenchRecord, measured: BenchRecord | None) -> str:
    if record.error:
        return f"{record.name}: not profiled ({record.error})"
    total, kinds = record.extra["total"], record.extra["kinds"]
    shares = [
        f"{_kind(kind, record.device)} {value / total:.0%} ({value:.2f} ms)"
        for kind, value in sorted(kinds.items(), key=lambda item: -item[1])
        if value >= 0.005 * total
    ]
    floor = "" if measured is None or measured.floor is None else f", floor {1e3 * measured.floor:.2f} ms"
    return f"{record.name}, {total:.2f} ms a profiled step{floor}: {', '.join(shares)}"


def _kind(kind: str, device: str) -> str:
    """Return a kind in words: on a CPU nothing waits, but Python takes its time between operators."""
    if kind != WAITING:
        return kind
    return "Python between operators" if device.startswith("CPU") else "the device waits"
