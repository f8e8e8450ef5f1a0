"""Which runs share a row and a column of a table, and which must not be averaged."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vicinal.benchmarks.plan import takes_choices
from vicinal.benchmarks.store import benchmark_of
from vicinal.errors import ConfigError
from vicinal.evaluation.record import Record
from vicinal.report.content import flat
from vicinal.report.select import facets

# What a run was measured on: each combination is a column, unless --by makes rows of it.
CONDITIONS = ("spec", "setting", "quick", "dataset", "backbone", "stream", "alpha", "batch_size")
# Who was measured: one row never averages over these.
WHO = ("row", "method", "algorithm", "statistics")
CHOSEN = "chosen"
LEFT_OUT = "training.out_of_fold."


@dataclass(frozen=True, eq=False)
class Run:
    """A record and all that it can be called by."""

    record: Record

    @cached_property
    def facets(self) -> dict[str, Any]:
        """Return the run's names with their values.

        What left-out models its source model has is none of a run that takes nothing from them: with one
        choice for all seeds only seed 0 has any.
        """
        about = benchmark_of(self.record).get("about")
        if about is None or takes_choices(about):
            return facets(self.record)
        named = facets(self.record)
        return {name: value for name, value in named.items() if not name.startswith(LEFT_OUT)}

    @cached_property
    def options(self) -> list[str]:
        """Return the names of what may be chosen model by model: who predicts, and the adapter's options."""
        mine = dict(flat(self.record.protocol.get("adapter") or {}))
        return ["predict", *(name for name in mine if name not in ("predict", "seed", "statistics.kind"))]

    @property
    def seed(self) -> int:
        """Return the seed of the trained model: five streams drawn for one are averaged, not five seeds."""
        return self.record.model_seed

    @property
    def slot(self) -> tuple[Any, ...]:
        """Return what two runs share only if one repeats the other or an option tells them apart."""
        place = tuple(self.facets.get(name) for name in CONDITIONS)
        return (*place, self.record.target, self.seed, self.record.seed)


Groups = dict[tuple[Any, ...], list[Run]]


def grouped(runs: Sequence[Run], by: Sequence[str]) -> Groups:
    """Return the runs of each row, the row called by its values of `by`; of repeated runs the last counts.

    An option that left-out domains chose model by model (one value for each run, not the same for all) reads
    "chosen": apart, its values would be rows of some seeds each.
    """
    optional = {name for run in runs for name in run.options}
    fixed = [name for name in by if name not in optional]
    groups: Groups = {}
    for members in _split(runs, fixed).values():
        choices = {name: _chosen(members, name) for name in by if name in optional}
        for run in members:
            key = tuple(CHOSEN if choices.get(name) else run.facets.get(name) for name in by)
            groups.setdefault(key, []).append(run)
    return {key: _without_repeats(members) for key, members in groups.items()}


def _split(runs: Iterable[Run], names: Sequence[str]) -> Groups:
    groups: Groups = {}
    for run in runs:
        groups.setdefault(tuple(run.facets.get(name) for name in names), []).append(run)
    return groups


def _chosen(runs: Sequence[Run], name: str) -> bool:
    """Return whether the runs differ in an option, but never where one could compare its values."""
    values = {run.facets.get(name) for run in runs}
    return len(values) > 1 and all(len(found) == 1 for found in _by_slot(runs, name).values())


def _by_slot(runs: Iterable[Run], name: str) -> dict[tuple[Any, ...], set[Any]]:
    # Runs that differ in who they are stand in different slots, whatever `by` says.
    found: dict[tuple[Any, ...], set[Any]] = {}
    for run in runs:
        who = tuple(run.facets.get(part) for part in WHO)
        found.setdefault((*who, *run.slot), set()).add(run.facets.get(name))
    return found


def _without_repeats(runs: Sequence[Run]) -> list[Run]:
    last: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        told = tuple(run.facets.get(name) for name in (*WHO, *run.options))
        last[(*run.slot, *told)] = run
    return list(last.values())


def clash(groups: Groups, by: Sequence[str]) -> tuple[str, list[Any]] | None:
    """Return the first name, with its values, that a row would average over without asking; None if none.

    Within a column these must be one: who was measured, how its model was trained, the data's options; and
    for one seed, target and stream the options of the adapter.
    """
    for members in groups.values():
        for place in _split(members, [name for name in CONDITIONS if name not in by]).values():
            found = unlike(place, _fixed_names(place))
            if found is not None:
                return found
    # Who predicts comes first: told apart by step size alone, labels would pass for the model's own output.
    for name in dict.fromkeys(name for members in groups.values() for run in members for name in run.options):
        for members in groups.values():
            both = next((found for found in _by_slot(members, name).values() if len(found) > 1), None)
            if both:
                return name, sorted(both, key=order)
    return None


def unlike(runs: Sequence[Run], names: Iterable[str] = CONDITIONS) -> tuple[str, list[Any]] | None:
    """Return the first of the names in which the runs differ, with its values; None if there is none."""
    for name in names:
        values = list(dict.fromkeys(run.facets.get(name) for run in runs))
        if len(values) > 1:
            return name, values
    return None


def _fixed_names(runs: Sequence[Run]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.facets)
    return [*WHO, *(name for name in names if _describes_training(name))]


def _describes_training(name: str) -> bool:
    own = name.startswith(("training.", "provenance.data_options."))
    # The algorithm is a field of the record: there ERM's theta is ERM's, with a phi beside it or without.
    return own and not name.endswith((".seed", ".algorithm"))


def checked_groups(runs: Sequence[Run], by: Sequence[str]) -> Groups:
    """Return the runs of each row; a mean over unlike runs is refused with the name that tells them apart."""
    groups = grouped(runs, by)
    found = clash(groups, by)
    if found is not None:
        name, values = found
        shown = ", ".join(map(str, values))
        raise ConfigError(
            f"a row would average over {name} ({shown}): add {name} to --by, or --where {name}={values[0]}"
        )
    return groups


def default_by(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return the names that rows need so that none averages over unlike runs: the method, then what clashes.

    Runs of a benchmark go by its rows.
    """
    by: tuple[str, ...] = ("row",) if all("row" in run.facets for run in runs) else ("method",)
    while (found := clash(grouped(runs, by), by)) is not None:
        by = (*by, found[0])
    return by


def order(value: Any) -> tuple[bool, float, str]:
    """Return a key that sorts numbers as numbers, before texts."""
    number = isinstance(value, int | float)
    return not number, float(value) if number else 0.0, str(value)


def places(runs: Iterable[Run], by: Sequence[str]) -> dict[tuple[Any, ...], str]:
    """Return the columns that runs fall in, each with a heading of what tells it from the others.

    Settings of a benchmark have names: what else differs is said only where these are not enough.
    """
    names = [name for name in CONDITIONS if name not in by]
    found = list(_split(runs, names))
    telling = [i for i in range(len(names)) if len({place[i] for place in found}) > 1]
    if "setting" in names and all(place[names.index("setting")] for place in found):
        telling = _needed(found, telling)
    return {place: ", ".join(_said(names[i], place[i]) for i in telling if place[i]) for place in found}


def _needed(found: Sequence[tuple[Any, ...]], telling: Sequence[int]) -> list[int]:
    """Return the positions, from the first on, that tell more apart than those before them."""
    needed: list[int] = []
    for i in telling:
        apart = len({tuple(place[j] for j in needed) for place in found})
        if len({tuple(place[j] for j in (*needed, i)) for place in found}) > apart:
            needed.append(i)
    return needed


def place_of(run: Run, by: Sequence[str]) -> tuple[Any, ...]:
    """Return the column that a run falls in."""
    return tuple(run.facets.get(name) for name in CONDITIONS if name not in by)


def shared_facts(runs: Sequence[Run], by: Sequence[str]) -> Mapping[str, Any]:
    """Return the conditions that are the same for all runs."""
    found = {name: {run.facets.get(name) for run in runs} for name in CONDITIONS if name not in by}
    return {name: next(iter(values)) for name, values in found.items() if len(values) == 1 and any(values)}


def said(facts: Mapping[str, Any]) -> str:
    """Return conditions in words."""
    return ", ".join(_said(name, value) for name, value in facts.items())


def _said(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name
    words = {"batch_size": f"batches of {value}", "stream": f"{value} stream"}
    return words.get(name, f"{name} {value}" if isinstance(value, int | float) else str(value))
