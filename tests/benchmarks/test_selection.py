"""What records say was chosen where."""

from dataclasses import replace
from pathlib import Path

import pytest

from vicinal.benchmarks.plan import plan
from vicinal.benchmarks.selection import selection
from vicinal.benchmarks.spec import Row, load_spec

TINY = load_spec(str(Path(__file__).parent / "tiny.toml"))
LEFT_OUT = "on left-out source domains"
STREAM = {"statistics": "stream"}
CASES = {
    # row: what is said with left-out models, and without any
    ("erm", ()): ("nothing else", "nothing else"),
    ("labels", ()): (f"phi {LEFT_OUT}", "nothing else"),
    ("soft", ()): (f"step size {LEFT_OUT}, 0.1, 1, 10 times the method's own", "the method's own step size"),
    ("soft", (("lr", 1e-3),)): ("step size given", "step size given"),
    ("memo", ()): ("the method's own step size", "the method's own step size"),
    ("vnl", ()): (f"rule and step size {LEFT_OUT}", "the method's own step size"),
    ("vnl", (("lr", 1e-3),)): (f"rule and step size {LEFT_OUT}; given: lr", "step size given"),
    ("vnl", (("update", "none"),)): (f"rule and step size {LEFT_OUT}; given: update", "nothing else"),
    ("vnl", (("predict", "own"), ("update", "entropy"))): (
        f"rule and step size {LEFT_OUT}; given: update, predict",
        "the method's own step size",
    ),
}


@pytest.mark.parametrize("with_left_out", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_what_is_said(case: tuple[str, tuple[tuple[str, object], ...]], with_left_out: bool) -> None:
    method, options = case
    setting = TINY.settings[0] if with_left_out else replace(TINY.settings[0], out_of_fold=None)
    made = plan(
        replace(
            TINY,
            rows=(Row("Row", method, options=dict(options)),),
            settings=(setting,),
            figures=(),
            expects=(),
        ),
        seeds=1,
    )
    (run,) = made.measures
    expected = CASES[case][not with_left_out]
    assert selection(run) == f"model on source validation images; {expected}"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (Row("Row", "erm"), f"temperature {LEFT_OUT}"),
        (Row("Row", "labels"), f"phi {LEFT_OUT}"),
        (
            Row("Row", "soft"),
            f"step size and temperature {LEFT_OUT}, 0.1, 1, 10 times the method's own",
        ),
        (
            Row("Row", "soft", options={"output_temperature": 1.0}),
            f"step size {LEFT_OUT}, 0.1, 1, 10 times the method's own",
        ),
        (
            Row("Row", "vnl"),
            f"rule and step size, and how sure it is where nothing else is asked of it, {LEFT_OUT}",
        ),
        (Row("Row", "vnl", options={"agreement": 0.0}), f"rule and step size {LEFT_OUT}"),
    ],
)
def test_temperatures_are_said_where_they_are_fitted(row: Row, expected: str) -> None:
    fitted = {**(TINY.settings[0].out_of_fold or {}), "calibrate": True}
    setting = replace(TINY.settings[0], out_of_fold=fitted)
    made = plan(replace(TINY, rows=(row,), settings=(setting,), figures=(), expects=()), seeds=1)
    assert selection(made.measures[0]) == f"model on source validation images; {expected}"
