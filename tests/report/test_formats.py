import csv
import io
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from vicinal.evaluation.statistics import Paired, Summary
from vicinal.report.export import Cell, Column, Row, Table
from vicinal.report.formats import as_csv, as_json, as_latex, as_markdown, as_rich, latex_text, markdown_text
from vicinal.report.layout import legend

FIVE = Summary(92.04, 1.26, 91.0, 93.0, 5)
BEST = Cell(FIVE, 95.9, 0.1, Paired(1.25, 0.5, 2.0, 0.0625, 5), rank=0)
SECOND = Cell(Summary(90.0, 0.5, 89.5, 90.5, 5), 93.25, rank=1)
CITED = Cell(paper=88.0)
SINGLE = Cell(
    Summary(80.0, None, None, None, 1),
    versus=Paired(-10.0, None, None, None, 1),
    unfinished=1,
    complete=False,
)
NASTY = r"50% & {more}_of $x^2$ ~ #1 \ <a|b> [red]*!*[/red]"


def table(*cells: Cell, **changes: object) -> Table:
    rows = tuple(Row(f"row {n}", (f"row {n}",), (cell,)) for n, cell in enumerate(cells))
    made = Table("A title", ("method",), (Column("MNIST"),), rows, baseline="row 1")
    return replace(made, **changes)  # type: ignore[arg-type]


FULL = table(BEST, SECOND, CITED, SINGLE)


def latex_rows(text: str) -> list[list[str]]:
    """Return the cells of all lines of a tabular, split where LaTeX splits them."""
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    return [[part.strip() for part in re.split(r"(?<!\\)&", line.removesuffix(r"\\"))] for line in lines]


def test_latex_in_full() -> None:
    assert as_latex(FULL) == "\n".join(
        [
            r"% \usepackage{booktabs}",
            r"\begin{table}[t]",
            r"\centering",
            r"\caption{A title. Mean $\pm$ standard deviation over 5 seeds. $^\dagger$ one seed: its spread "
            r"is unknown. Best in bold, runner-up underlined; means that print alike share. {*} seeds that "
            r"lack a target of the column do not count; where all do, the mean does not compete. Vs row 1: "
            r"mean difference over shared seeds; p of a two-sided sign-flip test over seeds. Paper: as "
            r"printed there.}",
            r"\begin{tabular}{lccc}",
            r"\toprule",
            r"& \multicolumn{3}{c}{MNIST} \\",
            r"\cmidrule(lr){2-4}",
            r"method & paper & ours & vs row 1 \\",
            r"\midrule",
            r"row 0 & 95.9 $\pm$ 0.1 & \textbf{92.0} $\pm$ 1.3 & +1.2 (p 0.062) \\",
            r"row 1 & 93.25 & \underline{90.0} $\pm$ 0.5 &  \\",
            r"row 2 & 88.0 &  &  \\",
            r"row 3 &  & 80.0$^\dagger$ * & $-$10.0 \\",
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def test_every_line_of_latex_has_as_many_cells_as_the_table_has_columns() -> None:
    groups = (Column("0", target="0", group="A & B"), Column("mean", group="A & B"), Column("C", group="C"))
    rows = (Row(NASTY, (NASTY, "x"), (BEST, SECOND, CITED)), Row("b", ("b", "y"), (SECOND, BEST, Cell())))
    text = as_latex(Table(NASTY, ("method", "statistics"), groups, rows))
    spec = re.search(r"begin\{tabular\}\{([lc]+)\}", text)
    assert spec is not None
    spans, *rest = latex_rows(text)
    widths = [int(width) for part in spans for width in re.findall(r"multicolumn\{(\d+)\}", part)]
    assert sum(widths) + 2 == len(spec[1])
    assert {len(cells) for cells in rest} == {len(spec[1])}
    assert r"\multicolumn{6}{c}{A \& B}" in text
    assert r"\cmidrule(lr){3-8} \cmidrule(lr){9-9}" in text


def test_one_line_of_headings_where_nothing_is_shared() -> None:
    text = as_latex(table(replace(BEST, paper=None, versus=None)))
    assert "multicolumn" not in text
    assert "cmidrule" not in text
    assert latex_rows(text)[0] == ["method", "MNIST"]


def test_latex_text_is_escaped() -> None:
    assert latex_text("50% & _#$ {}") == r"50\% \& \_\#\$ \{\}"
    assert latex_text("\\~^<>|") == (
        r"\textbackslash{}\textasciitilde{}\textasciicircum{}\textless{}\textgreater{}\textbar{}"
    )
    assert latex_text("90° ± 1\nnext") == r"90$^\circ$ $\pm$ 1 next"
    assert latex_text("--quick") == "-{}-quick"
    bare = re.sub(r"\\[&%$#_{}]|\$[^$]*\$|\\text\w+\{\}|\{[\[\]*]\}", "", latex_text(NASTY))
    assert not set(bare) & set("&%$#_{}~^\\<>|[]*")


def test_a_name_in_brackets_does_not_belong_to_the_line_before() -> None:
    rows = (Row("a", ("a",), (BEST,)), Row("[b]", ("[b]",), (BEST,)), Row("*", ("*",), (BEST,)))
    lines = as_latex(table(rows=rows)).splitlines()
    assert not [line for line in lines if line.lstrip().startswith(("[", "*"))]


def test_markdown_is_a_table() -> None:
    title, empty, *lines = as_markdown(FULL).splitlines()
    assert (title, empty) == ("**A title**", "")
    assert lines[:6] == [
        "| method | MNIST paper | MNIST ours | MNIST vs row 1 |",
        "|---|---:|---:|---:|",
        "| row 0 | 95.9 ± 0.1 | **92.0** ± 1.3 | +1.2 (p 0.062) |",
        "| row 1 | 93.25 | <ins>90.0</ins> ± 0.5 |  |",
        "| row 2 | 88.0 |  |  |",
        "| row 3 |  | 80.0† \\* | \N{MINUS SIGN}10.0 |",
    ]
    assert lines[6] == ""
    assert lines[7].startswith("mean ± standard deviation over 5 seeds; † one seed")


def test_markdown_text_is_escaped() -> None:
    assert markdown_text("a|b_c*d<e>&`[x]") == r"a\|b\_c\*d&lt;e&gt;&amp;\`\[x\]"
    row = Row("a|b", ("a|b",), (BEST,))
    *_, line = [x for x in as_markdown(table(rows=(row,))).splitlines() if x.startswith("|")]
    assert len(re.split(r"(?<!\\)\|", line)) == 2 + 4


def test_the_terminal_shows_everything_and_survives_brackets() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="standard")
    nasty = Row("x", ("[red]x[/]",), (BEST,))
    console.print(as_rich(replace(FULL, rows=(nasty, *FULL.rows[1:]), title="[b]t", headings=("[u]",))))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1m92.0\x1b[0m ± 1.3" in shown
    assert "\x1b[4m90.0\x1b[0m ± 0.5" in shown
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    for part in (
        "[b]t",
        "[u]",
        "[red]x[/]",
        "95.9 ± 0.1",
        "80.0† *",
        "vs row 1",
        "+1.2 (p 0.062)",
        "† one seed",
    ):
        assert part in plain


def test_a_narrow_terminal_breaks_headings_but_no_numbers() -> None:
    column = Column("a heading that is far longer than any number")
    console = Console(file=io.StringIO(), width=20, force_terminal=False)
    console.print(as_rich(replace(FULL, columns=(column,))), crop=False)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(part in shown for part in ("row 0", "95.9 ± 0.1", "92.0 ± 1.3", "+1.2 (p 0.062)", "80.0† *"))
    assert column.heading not in shown
    assert "…" not in shown
    assert max(len(line) for line in shown.splitlines()) < 70


def test_csv_has_every_number_unrounded() -> None:
    first, second, third, fourth = csv.DictReader(io.StringIO(as_csv(FULL)))
    assert {key: first[key] for key in ("method", "column", "target", "metric", "unit")} == {
        "method": "row 0",
        "column": "MNIST",
        "target": "",
        "metric": "accuracy",
        "unit": "%",
    }
    assert [float(first[key]) for key in ("mean", "std", "low", "high", "seeds")] == [92.04, 1.26, 91, 93, 5]
    assert [float(first[key]) for key in ("paper", "paper_std")] == [95.9, 0.1]
    names = ("difference", "difference_low", "difference_high", "p", "pairs")
    assert [float(first[key]) for key in names] == [1.25, 0.5, 2.0, 0.0625, 5]
    assert (second["paper_std"], second["difference"]) == ("", "")
    assert (third["mean"], third["complete"], third["paper"]) == ("", "", "88.0")
    assert (fourth["std"], fourth["seeds"], fourth["unfinished"], fourth["complete"]) == (
        "",
        "1",
        "1",
        "False",
    )


def test_csv_survives_commas_and_quotes() -> None:
    row = Row("x", ('a, "b"\n',), (BEST,))
    [line] = csv.DictReader(io.StringIO(as_csv(table(rows=(row,)))))
    assert line["method"] == 'a, "b"\n'


def test_json_has_every_number_and_no_nan() -> None:
    broken = Cell(Summary(math.nan, math.nan, math.nan, math.nan, 2))
    text = as_json(table(BEST, broken, Cell()))
    whole = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (whole["title"], whole["baseline"]) == ("A title", "row 1")
    [first], [second], third = (row["cells"] for row in whole["rows"])
    assert (first["mean"], first["paper"], first["p"], first["unit"]) == (92.04, 95.9, 0.0625, "%")
    assert (second["mean"], second["seeds"]) == (None, 2)
    assert third == []
    assert whole["rows"][0]["names"] == {"method": "row 0"}


def test_a_broken_cell_shows_as_nan() -> None:
    broken = Cell(Summary(math.nan, math.nan, math.nan, math.nan, 2))
    assert "| row 1 | NaN ± NaN |" in as_markdown(
        table(replace(BEST, paper=None, versus=None), broken)
    ).replace(" (2)", "")


def test_seeds_stand_in_the_legend_or_where_they_differ_in_the_cells() -> None:
    three = Cell(Summary(70.0, 1.0, 69.0, 71.0, 3))
    same, mixed = table(BEST, SECOND), table(BEST, three, SINGLE)
    assert "over 5 seeds" in legend(same)[0]
    assert "(5)" not in as_markdown(same)
    assert "their number in brackets" in legend(mixed)[0]
    text = as_latex(mixed)
    assert r"\textbf{92.0} $\pm$ 1.3 (5)" in text
    assert r"70.0 $\pm$ 1.0 (3)" in text
    assert r"80.0$^\dagger$" in text


def test_the_legend_explains_only_what_is_there() -> None:
    assert legend(table(CITED)) == ["paper: as printed there"]
    plain = Cell(Summary(70.0, 1.0, 69.0, 71.0, 3))
    assert legend(table(plain)) == ["mean ± standard deviation over 3 seeds"]
    few = replace(plain, versus=Paired(1.0, 0.5, 1.5, None, 3))
    assert legend(table(few))[-1] == "vs row 1: mean difference over shared seeds"
    assert legend(table(plain, notes=("a note",)))[0] == "a note"
