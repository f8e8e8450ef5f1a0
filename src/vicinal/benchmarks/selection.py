"""In words, for the record of a measurement: what was chosen where, and what a row of a spec asks for."""

from typing import Any

from vicinal.benchmarks.plan import FIXED, OUT_OF_FOLD, STEPLESS, MeasureRun

# Of a rule that left-out domains choose, what a row may ask for in place of their choice.
PARTS = ("update", "lr", "from_rest", "predict", "rounds", "crowd", "joint")


def selection(run: MeasureRun) -> str:
    """Return what was chosen for a measurement, and by what."""
    by = "" if run.chooser is None else ", by the left-out models of seed 0"
    return f"model on source validation images; {_beyond_the_model(run)}{by}"


def _beyond_the_model(run: MeasureRun) -> str:
    method, asked = run.entry.method, run.entry.options
    if method in OUT_OF_FOLD and left_out_options(run):
        return _rule(run)
    if run.chooses and method in FIXED:
        return "temperature on left-out source domains"
    if run.chooses:
        multiples = ", ".join(f"{scale:g}" for scale in run.about["step_sizes"])
        also = " and temperature" if calibrated(run) else ""
        return f"step size{also} on left-out source domains, {multiples} times the method's own"
    if method in (*STEPLESS, "labels", "single_sample") or asked.get("update") == "none":
        return "nothing else"
    return "step size given" if "lr" in asked else "the method's own step size"


def _rule(run: MeasureRun) -> str:
    asked = [name for name in PARTS if name in run.entry.options]
    sure = ", and how sure it is where nothing else is asked of it," if calibrated(run) else ""
    chosen = "phi" if run.entry.method == "labels" else f"rule and step size{sure}"
    given = f"; given: {', '.join(asked)}" if asked else ""
    return f"{chosen} on left-out source domains{given}"


def calibrated(run: MeasureRun) -> bool:
    """Return whether its temperature was chosen: `labels` have that of their phi."""
    given = {"output_temperature", "agreement"} & set(run.entry.options) or run.entry.method == "labels"
    return bool(left_out_options(run).get("calibrate")) and not given


def left_out_options(run: MeasureRun) -> dict[str, Any]:
    """Return the out-of-fold options that a choice was made by; empty: there were no left-out models."""
    trained: dict[str, Any] = run.about.get("chooser") or run.about["training"]
    return trained["out_of_fold"] or {}
