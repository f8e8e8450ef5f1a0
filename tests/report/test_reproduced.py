"""A benchmark for the terminal and its README, from records made up here."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from vicinal.benchmarks.spec import Expect, Figure, Row, Setting, Spec
from vicinal.evaluation.record import Record
from vicinal.report.benchmark import write_benchmark
from vicinal.report.reproduced import expectations_of, results_rich, write_readme

SPEC = Spec(
    "made",
    "Made | up",
    paper="Table 0",
    note="A note.",
    seeds=2,
    settings=(Setting("Digits", "digits", targets=(("0", "90"),)),),
    rows=(Row("ERM", "erm"), Row("Ours", "vnl", ours=True), Row("[Theirs]")),
    figures=(Figure("ERM", "Digits", 50.0, 0.5), Figure("[Theirs]", "Digits", 70.0)),
    expects=(Expect("Ours", "Digits", above="ERM"), Expect("ERM", "Digits", at_least=60.0, tolerance=1.0)),
)


def record(row: str, seed: int, target: str, accuracy: float, quick: bool = False) -> Record:
    return Record(
        dataset="digits",
        target=target,
        backbone="small",
        algorithm="erm",
        method=SPEC.row(row).method or "",
        statistics="batch",
        predict="own",
        stream="online",
        seed=seed,
        batch_size=20,
        accuracy=accuracy,
        ece=0.1,
        nll=1.0,
        brier=0.5,
        curve=[accuracy],
        seconds=1.0,
        images_per_second=10.0,
        reliability={},
        protocol={"benchmark": {"spec": "made", "setting": "Digits", "row": row, "quick": quick}},
        versions={},
    )


def records(quick: bool = False) -> list[Record]:
    values = {
        ("ERM", 0): (0.4, 0.5),
        ("ERM", 1): (0.5, 0.6),
        ("Ours", 0): (0.6, 0.7),
        ("Ours", 1): (0.7, 0.8),
    }
    return [
        record(row, seed, target, accuracy, quick)
        for (row, seed), both in values.items()
        for target, accuracy in zip(("0", "90"), both, strict=True)
    ]


def printed(found: list[Record], spec: Spec = SPEC) -> list[str]:
    console = Console(width=120, record=True, quiet=True)
    with console.capture() as captured:
        console.quiet = False
        console.print(results_rich(spec, found))
    return [" ".join(line.split()) for line in captured.get().splitlines()]


def test_paper_ours_and_difference_stand_side_by_side() -> None:
    lines = printed(records())
    assert "Method Paper Ours (seeds) Difference" in lines
    # Means over targets: 45 and 55, then 65 and 75; std of two values 10 apart: 7.07.
    assert "ERM 50.0 ± 0.5 50.0 ± 7.1 (2) 0.0" in lines
    assert "Ours 70.0 ± 7.1 (2)" in lines
    assert "[Theirs] 70.0" in lines


def test_a_seed_without_a_target_does_not_count_and_is_marked() -> None:
    lines = printed(records()[:-1])
    assert "Ours 65.0 (1) *" in lines
    assert any("a seed lacks a target" in line for line in lines)


def test_expectations_say_what_came_of_them() -> None:
    ours, erm = expectations_of(SPEC, records())
    assert (ours.met, erm.met) == (True, False)
    assert "70.0% here (2 seeds)" in ours.found
    assert "50.0% here (2 seeds)" in erm.found
    assert [one.met for one in expectations_of(SPEC, records()[:4])] == [None, False]


def test_the_readme_has_command_table_expectations_and_what_is_missing(tmp_path: Path) -> None:
    write_readme(SPEC, records(), tmp_path / "new", "vicinal reproduce made", ["missing data: a|b"])
    lines = (tmp_path / "new" / "README.md").read_text().splitlines()
    assert lines[0] == "# Made \\| up"
    assert "vicinal reproduce made" in lines
    assert "| ERM | 50.0 ± 0.5 | 50.0 ± 7.1 (2) | 0.0 |" in lines
    assert "| Ours |  | **70.0 ± 7.1 (2)** |  |" in lines
    assert any(line.startswith("- met: Digits: Ours above ERM. 70.0% here") for line in lines)
    assert any(
        line.startswith("- missed: Digits: ERM at least 60.0, give or take 1. 50.0%") for line in lines
    )
    assert "- missing data: a\\|b" in lines
    assert not any("quick" in line for line in lines)


def test_below_a_table_of_calibration_errors_stands_what_chance_makes_of_them(tmp_path: Path) -> None:
    told = "A row that was right exactly as often as it is sure would still have {} by chance."
    of_errors = replace(SPEC, metric="ece")
    # A coin of the bin's confidence: the one image is right or not.
    rates = {"ERM": 0.5, "Ours": 0.9}
    of_one = [
        replace(one, reliability={"count": [1.0], "confidence": [rates[one.protocol["benchmark"]["row"]]]})
        for one in records()
    ]
    for found, level in ((of_one, "18.0 to 50.0%"), (of_one[:4], "50.0%")):
        write_readme(of_errors, found, tmp_path, "vicinal reproduce made")
        assert told.format(level) in (tmp_path / "README.md").read_text().splitlines()
    for spec, found in ((SPEC, of_one), (of_errors, records())):
        write_readme(spec, found, tmp_path, "vicinal reproduce made")
        assert "by chance" not in (tmp_path / "README.md").read_text(), "of accuracy, or without bins"


def test_paragraphs_of_a_note_are_paragraphs_of_the_readme(tmp_path: Path) -> None:
    write_readme(
        replace(SPEC, note="One\nline.\n\nAn_other.\n"), records(), tmp_path, "vicinal reproduce made"
    )
    assert "\n```\n\nOne line.\n\nAn\\_other.\n\n## Digits" in (tmp_path / "README.md").read_text()


def test_a_quick_run_says_that_it_means_nothing(tmp_path: Path) -> None:
    write_readme(SPEC, records(quick=True), tmp_path, "vicinal reproduce made --quick")
    assert "its figures mean nothing" in (tmp_path / "README.md").read_text()


def test_another_net_than_the_tables_is_named(tmp_path: Path) -> None:
    sentence = "Measured with small, not with resnet18, which the table asks for."
    for net, said in (("resnet18", True), ("small", False), (None, False)):
        spec = replace(SPEC, settings=(replace(SPEC.settings[0], backbone=net),))
        write_readme(spec, records(), tmp_path, "vicinal reproduce made")
        write_benchmark(spec, records(), tmp_path)
        assert (f"**{sentence}**" in (tmp_path / "README.md").read_text()) == said
        assert (sentence in (tmp_path / "report.html").read_text()) == said


def test_the_readme_names_the_file_of_records_that_is_there(tmp_path: Path) -> None:
    write_readme(SPEC, records(), tmp_path, "vicinal reproduce made")
    assert "`records.jsonl`" in (tmp_path / "README.md").read_text()
    (tmp_path / "records.jsonl.gz").touch()
    write_readme(SPEC, records(), tmp_path, "vicinal reproduce made")
    assert "`records.jsonl.gz`" in (tmp_path / "README.md").read_text()


def by_angle() -> Spec:
    """The spec with the paper's figure on one target, and expectations of that target."""
    figures = (Figure("ERM", "Digits", 58.0, target="90"), Figure("[Theirs]", "Digits", 70.0))
    expects = (
        Expect("Ours", "Digits", at_least=75.0, target="90"),
        Expect("Ours", "Digits", at_least=75.0, target="0"),
        Expect("Ours", "Digits", above="ERM", target="90"),
    )
    return replace(SPEC, figures=figures, expects=expects)


def test_a_target_the_paper_has_a_figure_of_is_a_section_of_its_own() -> None:
    lines = printed(records(), by_angle())
    start = lines.index("Digits, 90")
    # ERM on 90: 50 and 60, ours 70 and 80.
    assert lines[start + 1 : start + 3] == ["ERM 58.0 55.0 ± 7.1 (2) \u22123.0", "Ours 75.0 ± 7.1 (2)"]
    assert "Digits, 0" not in lines


def test_the_readme_has_the_targets_side_by_side(tmp_path: Path) -> None:
    write_readme(by_angle(), records(), tmp_path, "vicinal reproduce made")
    text = (tmp_path / "README.md").read_text()
    assert "| Method | 0 | 90 |" in text
    assert "| ERM | 45.0 ± 7.1 | 55.0 ± 7.1, paper 58.0 |" in text


def test_an_expectation_of_one_target_is_held_against_that_target() -> None:
    at_90, at_0, above = expectations_of(by_angle(), records())
    assert (at_90.met, at_0.met, above.met) == (True, False, True)
    assert at_90.what == "Digits, 90: Ours at least 75.0"
    assert "difference +20.0" in above.found
