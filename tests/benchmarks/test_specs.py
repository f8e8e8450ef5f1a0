"""The paper's tables as data: every printed number, and what holds between them."""

import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from vicinal.benchmarks.check import EACH
from vicinal.benchmarks.plan import plan
from vicinal.benchmarks.spec import Setting, Spec, load_spec, spec_names
from vicinal.data.catalog import DATASETS
from vicinal.data.load import with_options
from vicinal.models.backbones import find_backbone, preprocessing_for
from vicinal.report.specs import specs_markdown

ROOT = Path(__file__).parents[2]
PAPER = Path(os.environ.get("VICINAL_TEST_PAPER", ROOT.parent / "shared" / "paper.tex.txt"))
SPECS = {name: load_spec(name) for name in spec_names()}
PUBLISHED, OURS = "This paper, as published", "This paper"
# One source domain simulates no shift: what needs one is not there.
SINGLE_SOURCE = "cifar10_c"
# Where the last row of the paper's table has a name of its own.
ABLATION = "Meta-generalization with variational neighbor labels"
PLOTS = ("calibration", "along_inference")
# Printed means that are not those of their domains: the mean of the domains, to two decimals.
PAPER_DISAGREES = {
    ("batch_sizes", "Baseline model", "16 samples per step"): "80.25",
    ("batch_sizes", "Baseline model", "64 samples per step"): "80.25",
    ("batch_sizes", "Baseline model", "128 samples per step"): "80.25",
    ("batch_sizes", PUBLISHED, "64 samples per step"): "84.96",
    ("update_importance", "ERM baseline", "PACS"): "80.25",
}
each_spec = pytest.mark.parametrize("name", list(SPECS))


def text_of(name: str) -> str:
    return files("vicinal.benchmarks").joinpath("specs", f"{name}.toml").read_text(encoding="utf-8")


def printed_figures(name: str) -> list[dict[str, Any]]:
    """Return the figures with their decimals as the file writes them."""
    table = tomllib.loads(text_of(name), parse_float=Decimal)
    return list(table.get("figures", []))


def targets_of(setting: Setting) -> set[str]:
    if setting.targets == EACH:
        return set(DATASETS[setting.data].domains)
    return {target for group in setting.targets for target in group}


def published_row(spec: Spec) -> str:
    return ABLATION if spec.name == "ablation" else PUBLISHED


# --- What is there -----------------------------------------------------------------------------------------


def test_every_table_and_every_measured_figure_of_the_paper_has_a_spec() -> None:
    aliases = Counter(alias for spec in SPECS.values() for alias in spec.aliases)
    assert set(aliases.values()) == {1}
    # Figures 1 and 6 are drawings, Figure 2 shows single images.
    assert set(aliases) == {f"table{n}" for n in range(1, 13)} | {"figure3", "figure4", "figure5"}
    assert not set(aliases) & set(SPECS)


@each_spec
def test_a_spec_says_where_it_is_in_the_paper(name: str) -> None:
    spec = SPECS[name]
    assert text_of(name).startswith(f"# vicinal reproduce {name}\n")
    for alias in spec.aliases:
        kind, number = re.fullmatch(r"(table|figure)(\d+)", alias).groups()  # type: ignore[union-attr]
        assert re.search(rf"{kind.title()} {number}\b", spec.paper)
        assert load_spec(alias) == spec
    assert spec.aliases or "in the text" in spec.paper
    assert spec.title
    assert spec.seeds == 5


@each_spec
def test_notes_fold_to_sentences(name: str) -> None:
    note = SPECS[name].note
    assert "\n" not in note
    assert "  " not in note
    assert not re.search(r"\w- \w", note)
    assert note.endswith(".")


@each_spec
def test_the_papers_method_has_two_rows(name: str) -> None:
    spec = SPECS[name]
    published = spec.row(published_row(spec))
    if name == SINGLE_SOURCE:
        assert (published.method, published.algorithm) == ("neighbor", "neighbor")
        assert not any(row.ours for row in spec.rows)
        return
    assert (published.method, published.algorithm) == ("vnl_paper", "meta")
    assert [row.label for row in spec.rows if row.ours] == [OURS]
    assert (spec.row(OURS).method, spec.row(OURS).algorithm) == ("vnl", "meta")
    assert OURS not in {figure.row for figure in spec.figures}


@each_spec
def test_what_helps_ours_is_offered_to_the_others(name: str) -> None:
    spec = SPECS[name]
    kinds: dict[str, set[str]] = {}
    for row in spec.rows:
        if row.method in ("soft", "tent", "bn"):
            kinds.setdefault(row.method, set()).add(str(row.options.get("statistics", "batch")))
    if spec.metric in ("seconds", "training_seconds"):
        return
    assert kinds
    assert all("stream" in found for found in kinds.values())
    if name != SINGLE_SOURCE:
        assert any(row.method in ("soft", "hard") and row.algorithm == "meta" for row in spec.rows)


@each_spec
def test_rows_without_a_method_are_citations_and_the_others_are_measured_somewhere(name: str) -> None:
    spec = SPECS[name]
    with_figures = {figure.row for figure in spec.figures}
    for row in spec.rows:
        if row.method is None:
            assert row.label in with_figures
            assert re.search(r"\b(19|20)\d\d\)$", row.label)


@pytest.mark.parametrize("name", [name for name in SPECS if name not in PLOTS])
def test_the_papers_own_method_has_a_figure_in_every_column(name: str) -> None:
    spec = SPECS[name]
    found = {figure.setting for figure in spec.figures if figure.row == published_row(spec)}
    assert found == {setting.name for setting in spec.settings}


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_without_numbers_has_none_and_says_so(name: str) -> None:
    assert SPECS[name].figures == ()
    assert "a plot without numbers" in SPECS[name].note


# --- Figures among themselves ------------------------------------------------------------------------------


def means_beside_domains() -> Iterator[tuple[tuple[str, str, str], Decimal, list[Decimal]]]:
    """Yield what the paper prints as a mean, and the figures of all its domains, where it has both."""
    for name, spec in SPECS.items():
        figures = printed_figures(name)
        for mean in (figure for figure in figures if "target" not in figure):
            place = (mean["row"], mean["setting"])
            parts = {
                f["target"]: f["value"]
                for f in figures
                if "target" in f and (f["row"], f["setting"]) == place
            }
            if set(parts) == targets_of(spec.setting(mean["setting"])):
                yield (name, *place), mean["value"], list(parts.values())


def test_printed_means_are_those_of_the_printed_domains() -> None:
    checked, differing = 0, {}
    for place, mean, parts in means_beside_domains():
        checked += 1
        mine = sum(parts, Decimal()) / len(parts)
        # Half a unit of the last place of the mean, and as much of its parts.
        rounding = sum(Decimal(1).scaleb(int(value.as_tuple().exponent)) / 2 for value in (mean, parts[0]))
        if abs(mine - mean) > rounding:
            differing[place] = str(mine.quantize(Decimal("0.01")))
    assert checked == 17
    assert differing == PAPER_DISAGREES
    for (name, _, _), mine in differing.items():
        assert mine in SPECS[name].note


@each_spec
def test_each_figure_stands_once(name: str) -> None:
    places = Counter((f.row, f.setting, f.target) for f in SPECS[name].figures)
    assert not [place for place, count in places.items() if count > 1]


def test_the_same_cell_has_the_same_figure_in_every_spec() -> None:
    """PACS with ResNet-18 and batches of 20, ERM and the paper's method, stands in many tables."""
    cells: dict[tuple[str, str | None], set[Decimal]] = {}
    for name, setting in (
        ("comparison", "PACS, ResNet-18"),
        ("ablation", "PACS"),
        ("augmentation", "PACS"),
        ("update_importance", "PACS"),
        ("pretraining_phase", "PACS"),
    ):
        rows = {"ERM baseline": "ERM baseline", published_row(SPECS[name]): PUBLISHED}
        for figure in printed_figures(name):
            if figure["setting"] == setting and figure["row"] in rows:
                cells.setdefault((rows[figure["row"]], figure.get("target")), set()).add(figure["value"])
    assert len(cells) == 10
    assert all(len(values) == 1 for values in cells.values())


def test_figures_of_domains_are_taken_over_with_their_deviations() -> None:
    table12 = {(f.row, f.target): f for f in SPECS["update_importance"].figures if f.target is not None}
    for name in ("comparison", "ablation"):
        taken = [figure for figure in SPECS[name].figures if figure.target is not None]
        assert len(taken) in (4, 8)
        for figure in taken:
            row = PUBLISHED if figure.row == ABLATION else figure.row
            assert (figure.value, figure.std) == (
                table12[row, figure.target].value,
                table12[row, figure.target].std,
            )


@each_spec
def test_expectations_are_the_papers_figures(name: str) -> None:
    spec = SPECS[name]
    for expect in spec.expects:
        bound = expect.at_least if expect.at_least is not None else expect.at_most
        if bound is None:
            continue
        row = published_row(spec) if expect.row == OURS else expect.row
        here = [f for f in spec.figures if (f.row, f.setting) == (row, expect.setting)]
        means = [f.value for f in here if f.target == expect.target]
        if not means:  # the paper prints no mean
            assert expect.target is None
            means = [round(sum(f.value for f in here) / len(here), 1)]
            assert f"{means[0]}" in spec.note
        assert bound == means[0]
        assert 0 < expect.tolerance <= 1


# --- What is run -------------------------------------------------------------------------------------------


def all_settings() -> list[Any]:
    return [
        pytest.param(setting, id=f"{name}: {setting.name}")
        for name, spec in SPECS.items()
        for setting in spec.settings
    ]


@pytest.mark.parametrize("setting", all_settings())
def test_columns_train_as_the_paper_says(setting: Setting) -> None:
    assert setting.weights == "timm"
    if setting.data.startswith("rotated"):  # small images are learned in fewer steps
        assert (setting.backbone, setting.training["batch_size"]) == ("resnet18.tv_in1k", 70)
    else:
        assert setting.training["iterations"] == 10000
    # torchvision's first ImageNet weights, as the methods the paper follows use; timm's own are stronger.
    assert setting.backbone in ("resnet18.tv_in1k", "resnet50.tv_in1k")
    assert find_backbone(setting.backbone).downloads


@pytest.mark.parametrize("setting", all_settings())
def test_quick_is_small_and_possible(setting: Setting) -> None:
    quick, entry = setting.quick, DATASETS[setting.data]
    assert quick["training"]["iterations"] <= 10
    assert quick["backbone"] == "small"
    assert quick.get("weights", setting.weights) == "none"
    size = quick.get("size", setting.size)
    assert preprocessing_for("small", channels=entry.channels, size=size).size == size
    options = with_options(entry, quick["data_options"])
    if "images" in quick["data_options"]:
        assert len(entry.classes) <= options.images <= 700
    if setting.out_of_fold is not None:
        assert quick["out_of_fold"]["stream_images"] <= 50
    named = {target for group in quick.get("targets", ()) for target in group}
    assert named <= targets_of(setting)


def test_domains_are_the_papers() -> None:
    single, multiple = SPECS["complex_scenarios"].settings
    assert single.sources == multiple.sources == ("0", "15", "75", "90")
    assert single.targets == multiple.targets == (("30", "45", "60"),)
    assert (single.stream, multiple.stream) == ("online", "mixed")
    (shift,) = SPECS["shift_extent"].settings
    assert (shift.sources, shift.targets) == (("0", "15", "30", "45"), (("60", "75", "90"),))
    for setting in SPECS["rotated"].settings:
        assert (setting.sources, setting.targets) == ((), (("0", "90"),))
    assert [setting.batch_size for setting in SPECS["batch_sizes"].settings] == [16, 64, 128]
    assert [s.training.get("phi_layers", 3) for s in SPECS["phi_layers"].settings] == [2, 3]
    assert SPECS["along_inference"].settings[0].targets == (("art_painting",),)


def test_the_page_has_a_line_for_each() -> None:
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    assert specs_markdown(SPECS.values()) in page


# --- Against the paper itself ------------------------------------------------------------------------------

needs_paper = pytest.mark.skipif(
    not PAPER.is_file(), reason="the paper's LaTeX is not there (VICINAL_TEST_PAPER)"
)
Cell = tuple[Decimal, Decimal | None] | None


def latex_table(label: str) -> list[list[Cell]]:
    """Return the cells with numbers of every row of the table that has this label, None for a dash."""
    text = PAPER.read_text(encoding="utf-8")
    tables = re.findall(r"\\begin\{(?:wrap)?table\*?\}.*?\\end\{(?:wrap)?table\*?\}", text, re.DOTALL)
    (table,) = (one for one in tables if f"\\label{{{label}}}" in one)
    body = table.split("\\midrule", 1)[1].split("\\bottomrule")[0]
    rows = [[latex_cell(cell) for cell in row.split("&")[1:]] for row in re.split(r"\\\\", body)]
    return [[cell for cell in row if cell != "words"] for row in rows if row]  # type: ignore[misc]


def latex_cell(cell: str) -> Cell | str:
    cell = re.sub(r"\\(text)?color\w*\{[^}]*\}|eq\.~\\ref\{[^}]*\}", "", cell)
    time = re.search(r"(?:(\d+)m )?(\d+)s", cell)
    if time:
        return Decimal(60 * int(time[1] or 0) + int(time[2])), None
    number = re.search(r"(\d+(?:\.\d+)?)(?:.*?\$\\pm\$(\d+\.\d+)?)?", cell, re.DOTALL)
    if number:
        return Decimal(number[1]), None if number[2] is None else Decimal(number[2])
    return None if re.search(r"(^|[\s{])-([\s}]|$)", cell) else "words"


def cells(name: str, row: str, columns: Iterable[tuple[str, str | None]]) -> list[Cell]:
    """Return a row of a spec as the table prints it: columns are pairs of setting and target."""
    found = {
        (f["row"], f["setting"], f.get("target")): (f["value"], f.get("std")) for f in printed_figures(name)
    }
    return [found.get((row, *column)) for column in columns]


def rows_with_figures(name: str) -> list[str]:
    figures = {figure.row for figure in SPECS[name].figures}
    return [row.label for row in SPECS[name].rows if row.label in figures]


def by_setting(name: str) -> list[tuple[str, str | None]]:
    return [(setting.name, None) for setting in SPECS[name].settings]


def by_domain(setting: str) -> list[tuple[str, str | None]]:
    return [(setting, target) for target in ("photo", "art_painting", "cartoon", "sketch", None)]


@needs_paper
@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("comparison", "table:all_datasets"),
        ("mini_domainnet", "table:mini_domain"),
        ("rotated", "table:mnist"),
        ("test_cost", "table:runtime"),
        ("domain_generalization", "table:dg_comparison"),
    ],
)
def test_tables_by_column_are_as_printed(name: str, label: str) -> None:
    mine = [cells(name, row, by_setting(name)) for row in rows_with_figures(name)]
    assert mine == latex_table(label)


@needs_paper
def test_tables_by_domain_are_as_printed() -> None:
    for name, label in (("augmentation", "ablationdata_aug"), ("update_importance", "table:pl_labels")):
        mine = [cells(name, row, by_domain("PACS")) for row in rows_with_figures(name)]
        assert mine == latex_table(label)
    baseline, *others = latex_table("ablation_batch_size")
    settings = [setting.name for setting in SPECS["batch_sizes"].settings]
    assert [cells("batch_sizes", "Baseline model", by_domain(one)) for one in settings] == [baseline] * 3
    mine = [
        cells("batch_sizes", row, by_domain(one))
        for one in settings
        for row in ("Soft pseudo label", PUBLISHED)
    ]
    assert mine == others
    printed = latex_table("table:angle_comparison")
    angles = [("Rotated MNIST", target) for target in ("60", "75", "90")]
    assert [cells("shift_extent", row, angles) for row in rows_with_figures("shift_extent")] == printed


@needs_paper
def test_the_other_tables_are_as_printed() -> None:
    rows = rows_with_figures("ablation")
    assert [cells("ablation", row, by_setting("ablation")) for row in rows[:4]] == latex_table("ablation")
    columns = zip(*latex_table("tab:multi_modal"), strict=True)  # settings are its rows
    name = "complex_scenarios"
    assert [cells(name, row, by_setting(name)) for row in rows_with_figures(name)] == [
        list(c) for c in columns
    ]
    hours = [[size, (time[0] * 3600, None)] for size, time in latex_table("table:source_training")]  # type: ignore[index, misc]
    name = "training_cost"
    assert [cells(name, row, by_setting(name)) for row in rows_with_figures(name)] == hours


@needs_paper
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "cifar10_c",
            ("achieved 21.60\\% as the error rate", "achieves 29.14 \\%", "Tent achieves 14.30 \\%"),
        ),
        ("domainnet", ("achieved 41.8\\% mean accuracy in comparison to ERM, which achieves 40.9\\%",)),
        ("phi_layers", ("a mean accuracy of 57.1 with 2 layers and 64.3 with 3 layers",)),
        (
            "pretraining_phase",
            (
                "obtains 83.0\\% accuracy with $\\pm$0.2\\% standard",
                "obtains 83.8 accuracy with $\\pm$0.5\\% standard",
                "obtains 85.0 \\% accuracy with $\\pm$0.4\\% standard",
            ),
        ),
        ("ablation", ("achieve mean accuracy of 82.2 and 83.9 on PACS, respectively",)),
    ],
)
def test_figures_of_the_text_are_as_printed(name: str, words: tuple[str, ...]) -> None:
    text = PAPER.read_text(encoding="utf-8")
    assert [word for word in words if word not in text] == []
    numbers = set(re.findall(r"\d+\.\d+", " ".join(words)))
    figures = [f for f in printed_figures(name) if "target" not in f]
    mine = {str(f[key]) for f in figures for key in ("value", "std") if key in f}
    assert numbers <= mine
    assert name == "ablation" or mine == numbers


@needs_paper
def test_tables_and_figures_are_numbered_in_the_order_of_their_captions() -> None:
    text = PAPER.read_text(encoding="utf-8")
    floats = re.findall(r"\\begin\{(?:wrap)?(table|figure)\*?\}(.*?)\\end\{(?:wrap)?\1\*?\}", text, re.DOTALL)
    numbers = Counter[str]()
    labels = {}
    for kind, body in floats:
        numbers[kind] += 1
        labels[f"{kind.title()} {numbers[kind]}"] = re.search(r"\\label\{(.*?)\}", body)[1]  # type: ignore[index]
    assert (numbers["table"], numbers["figure"]) == (12, 6)
    for spec in SPECS.values():
        for place, label in re.findall(r"((?:Table|Figure) \d+) \((.*?)\)", spec.paper):
            assert labels[place] == label


OWN = sorted((ROOT / "benchmarks").glob("*.toml"))


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_studies_of_our_own_can_be_planned(path: Path) -> None:
    spec = load_spec(path)
    assert path.read_text(encoding="utf-8").startswith(f"# vicinal reproduce benchmarks/{path.name} ")
    measured = {(run.setting, run.row) for run in plan(spec).measures}
    assert {row.label for row in spec.rows} == {row for _, row in measured}
    assert plan(spec, quick=True).measures
    assert [row.method for row in spec.rows if row.ours] == ["vnl"]
