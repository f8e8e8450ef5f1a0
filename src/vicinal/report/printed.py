"""Numbers and names as printed, and who leads at that precision."""

import math
from collections.abc import Sequence

MINUS = "\N{MINUS SIGN}"


def number(value: float, decimals: int) -> str:
    """Return a number with so many decimals; NaN for what is not finite, never a negative zero."""
    if not math.isfinite(value):
        return "NaN"
    text = f"{value:,.{decimals}f}"
    return text.removeprefix("-") if _zero(text) else text.replace("-", MINUS)


def signed(value: float, decimals: int) -> str:
    """Return a difference with its sign; what prints as zero has none."""
    text = number(value, decimals)
    return text if text[0] in f"N{MINUS}" or _zero(text) else f"+{text}"


def as_given(value: float, decimals: int) -> str:
    """Return a figure of the paper with all the decimals it has, at least so many."""
    own = len(f"{value:.10f}".rstrip("0").partition(".")[2])
    return number(value, max(decimals, own))


def probability(p: float) -> str:
    """Return a p value with two digits that say something."""
    if not math.isfinite(p):
        return "NaN"
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def leaders(values: Sequence[float], decimals: int, higher_is_better: bool) -> list[int | None]:
    """Return 0 for the best values as printed, 1 for the runners-up, None for the others and for NaN.

    Values that print alike share their rank. One value alone leads nobody.
    """
    shown = [float(f"{value:.{decimals}f}") if math.isfinite(value) else None for value in values]
    known = [value for value in shown if value is not None]
    if len(known) < 2:
        return [None] * len(shown)
    ranking = sorted(set(known), reverse=higher_is_better)[:2]
    return [ranking.index(value) if value in ranking else None for value in shown]


def told_apart(bases: Sequence[str], details: Sequence[Sequence[str]]) -> list[str]:
    """Return each base name, with those of its details in brackets that tell it from its namesakes."""
    names = []
    for base, mine in zip(bases, details, strict=True):
        namesakes = [other for name, other in zip(bases, details, strict=True) if name == base]
        telling = [i for i in range(len(mine)) if len({other[i] for other in namesakes}) > 1]
        extra = ", ".join(mine[i] for i in telling)
        names.append(f"{base} ({extra})" if extra else base)
    return names


def _zero(text: str) -> bool:
    return not text.strip("-0.,")
