"""A spec file: what it holds is what is read, and what is wrong with it is one line with file and key."""

import dataclasses
from pathlib import Path
from typing import get_type_hints

import pytest

from vicinal.benchmarks.options import real_options
from vicinal.benchmarks.spec import READERS, Expect, Figure, Row, Setting, Spec, load_spec, spec_names
from vicinal.data.augment import Augment
from vicinal.data.augmix import AugMix
from vicinal.errors import ConfigError, UnknownNameError, VicinalError

TINY = Path(__file__).parent / "tiny.toml"
TEXT = """
title = "A table"
paper = "Table 0"
aliases = ["table0"]
note = "Two sentences."
metric = "error"
seeds = 3

[[settings]]
name = "Turned"
data = "rotated_mnist"
data_options = { test = "100" }
targets = [["0", "90"], ["15"]]
sources = ["30", "45"]
backbone = "resnet18"
weights = "none"
size = 28
stream = "label_shift"
alpha = 0.1
batch_size = 7
metric = "ece"
training = { iterations = 5 }
out_of_fold = { stream_images = 50, step_sizes = [1e-3, 1e-4] }
quick = { batch_size = 3, training = { iterations = 1 } }

[[settings]]
name = "Alone"
data = "cifar10_c"
out_of_fold = false

[[settings]]
name = "Photos"
data = "pacs"
targets = "each"

[[rows]]
label = "ERM"
method = "erm"

[[rows]]
label = "Theirs"

[[rows]]
label = "Ours"
method = "vnl_paper"
algorithm = "meta"
options = { augment = "augmix", lr = 1 }
ours = true
settings = ["Turned"]

[[figures]]
row = "Theirs"
setting = "Photos"
value = 80
std = 0.5
target = "sketch"

[[expects]]
row = "Ours"
setting = "Turned"
below = "ERM"
tolerance = 0.5
"""


def test_every_key_is_read_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT, encoding="utf-8")
    turned = Setting(
        name="Turned",
        data="rotated_mnist",
        targets=(("0", "90"), ("15",)),
        sources=("30", "45"),
        data_options={"test": "100"},
        backbone="resnet18",
        weights="none",
        size=28,
        stream="label_shift",
        batch_size=7,
        alpha=0.1,
        training={"iterations": 5},
        out_of_fold={"stream_images": 50, "step_sizes": [1e-3, 1e-4]},
        quick={"batch_size": 3, "training": {"iterations": 1}},
        metric="ece",
    )
    assert (
        load_spec(path)
        == load_spec(str(path))
        == Spec(
            name="mine",
            title="A table",
            aliases=("table0",),
            paper="Table 0",
            note="Two sentences.",
            metric="error",
            seeds=3,
            settings=(
                turned,
                Setting("Alone", "cifar10_c", out_of_fold=None),
                Setting("Photos", "pacs", targets=(("each",),)),
            ),
            rows=(
                Row("ERM", "erm"),
                Row("Theirs"),
                Row("Ours", "vnl_paper", "meta", {"augment": "augmix", "lr": 1}, True, ("Turned",)),
            ),
            figures=(Figure("Theirs", "Photos", 80.0, 0.5, "sketch"),),
            expects=(Expect("Ours", "Turned", below="ERM", tolerance=0.5),),
        )
    )


def test_every_field_can_be_written_in_a_file() -> None:
    for kind, readers in READERS.items():
        wanted = {item.name for item in dataclasses.fields(kind)} - ({"name"} if kind is Spec else set())
        assert set(readers) == wanted
        assert set(get_type_hints(kind)) >= wanted


def test_columns_rows_and_metrics_are_found_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT, encoding="utf-8")
    spec = load_spec(path)
    assert spec.setting("Photos").data == "pacs"
    assert spec.row("Ours").ours
    assert (spec.metric_of("Turned"), spec.metric_of("Photos")) == ("ece", "error")
    assert [row.label for row in spec.rows_of(spec.setting("Turned"))] == ["ERM", "Ours"]
    assert [row.label for row in spec.rows_of(spec.setting("Photos"))] == ["ERM"]


WRONG = [
    ("seeds = 3", "seed = 3", "unknown key 'seed'"),
    ("seeds = 3", 'seeds = "3"', "seeds must be a whole number, not '3'"),
    ("seeds = 3", "seeds = true", "seeds must be a whole number, not True"),
    ("seeds = 3", "seeds = 0", "seeds must be at least 1"),
    ('title = "A table"', "", "'title' is missing"),
    ('title = "A table"', 'name = "x"\ntitle = "A table"', "unknown key 'name'"),
    ('metric = "error"', 'metric = "f1"', "unknown metric 'f1'"),
    ('metric = "ece"', 'metric = "f1"', "setting 'Turned': unknown metric 'f1'"),
    ('aliases = ["table0"]', 'aliases = "table0"', "aliases must be a list, not 'table0'"),
    ('data = "pacs"', 'data = "pac"', "setting 'Photos': unknown dataset 'pac'"),
    ('name = "Photos"', 'name = "Turned"', "setting 'Turned' stands there twice"),
    ('label = "Theirs"', 'label = "ERM"', "row 'ERM' stands there twice"),
    ('data_options = { test = "100" }', 'data_options = { tests = "1" }', "unknown option tests"),
    ('data_options = { test = "100" }', "data_options = { test = 100 }", "data_options.test must be text"),
    ('["15"]', '["16"]', "unknown domain '16'"),
    ('["15"]', '["30"]', "'30' is a target and a source"),
    ('["15"]', "[]", "a group of targets is empty"),
    ('targets = "each"', 'targets = "all"', "targets must be a list, not 'all'"),
    ('targets = "each"', 'targets = "each"\nsources = ["photo"]', "exclude each other"),
    ("size = 28", "size = 28.5", "size must be a whole number"),
    ('stream = "label_shift"', 'stream = "mixed"', "a mixed stream needs two targets or more"),
    ('stream = "label_shift"', 'stream = "x"', "unknown stream 'x'"),
    ("batch_size = 7", "batch_size = 0", "batch_size must be at least 1"),
    ('backbone = "resnet18"', 'backbone = "resnet19x"', "unknown backbone 'resnet19x'"),
    (
        'backbone = "resnet18"\nweights = "none"\nsize = 28',
        'backbone = "small"\nsize = 64',
        "64 is no such size",
    ),
    ("training = { iterations = 5 }", "training = { iteration = 5 }", "unknown key of training 'iteration'"),
    ("training = { iterations = 5 }", "training = { seed = 5 }", "unknown key of training 'seed'"),
    ("training = { iterations = 5 }", "training = { iterations = 0 }", "iterations must be at least 1"),
    ("stream_images = 50", "images = 50", "unknown key of out_of_fold 'images'"),
    ("out_of_fold = false", "out_of_fold = true", "out_of_fold must be a table, not True"),
    ("quick = { batch_size = 3", "quick = { name = 'x'", "quick: unknown key 'name'"),
    ("training = { iterations = 1 }", "training = { iterations = 0 }", "iterations must be at least 1"),
    ('method = "erm"', 'method = "ermm"', "row 'ERM': unknown method 'ermm'"),
    ('algorithm = "meta"', 'algorithm = "metta"', "row 'Ours': unknown algorithm 'metta'"),
    ("lr = 1", "rate = 1", "row 'Ours': unknown option rate"),
    ("lr = 1", "lr = 0", "row 'Ours': an adapter needs lr above 0"),
    ("lr = 1", "seed = 1", "row 'Ours': the seed is the benchmark's"),
    ('"augmix"', '"augmax"', "row 'Ours': augment must be"),
    ('settings = ["Turned"]', 'settings = ["turned"]', "row 'Ours': unknown setting 'turned'"),
    ('label = "Theirs"', 'label = "Theirs"\noptions = { lr = 1 }', "row 'Theirs': options without a method"),
    ('row = "Theirs"', 'row = "They"', "figures[1]: unknown row 'They'"),
    ('target = "sketch"', 'target = "Sketch"', "figures[1]: unknown target 'Sketch'"),
    ('setting = "Photos"\nvalue', 'setting = "Alone"\nvalue', "figures[1]: unknown target 'sketch'"),
    ("value = 80", 'value = "80"', "figures[1]: value must be a number"),
    ('below = "ERM"', "", "expects[1]: give one of at_least, above, at_most and below"),
    ('below = "ERM"', 'below = "ERM"\nat_most = 1', "expects[1]: give one of"),
    ('below = "ERM"', 'below = "ERM"\ntarget = "45"', "expects[1]: unknown target '45'"),
    ('below = "ERM"', 'below = "Theirs"', "expects[1]: unknown row measured in 'Turned' 'Theirs'"),
    ('row = "Ours"\nsetting = "Turned"', 'row = "Ours"\nsetting = "Photos"', "measured in 'Photos' 'Ours'"),
    ("[[expects]]", "[[expects", "not TOML"),
]


@pytest.mark.parametrize(("old", "new", "said"), WRONG, ids=[case[2] for case in WRONG])
def test_what_is_wrong_is_one_line_with_file_and_key(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in TEXT
    path = tmp_path / "mine.toml"
    path.write_text(TEXT.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_spec(path)
    assert str(error.value).startswith(f"{path}: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_each_domain_of_a_folder_cannot_be_known_beforehand(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = TEXT.replace('data = "pacs"', f'data = "{tmp_path.as_posix()}"')
    assert text != TEXT
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r'targets "each" needs the domains of the catalog'):
        load_spec(path)


def test_a_spec_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: no such spec"):
        load_spec("nowhere.toml")
    with pytest.raises(UnknownNameError, match=r"unknown spec 'nowhere': choose from .*rotated"):
        load_spec("nowhere")


def test_shipped_specs_are_found_by_name_and_by_alias() -> None:
    assert {"rotated", "comparison"} <= set(spec_names())
    assert load_spec("table3").name == "rotated"


def test_options_become_what_methods_and_trainings_take() -> None:
    assert real_options({"augment": True, "step_sizes": [1, 2], "lr": 0.1}) == {
        "augment": Augment(),
        "step_sizes": (1, 2),
        "lr": 0.1,
    }
    assert real_options({"augment": False})["augment"] is None
    assert real_options({"augment": "augmix"})["augment"] == AugMix()
    assert real_options({"augment": {"hue": 0.1}})["augment"] == Augment(hue=0.1)
    assert (
        real_options({"statistics": {"kind": "blend", "source_images": 4}})["statistics"].source_images == 4
    )
    assert real_options({"statistics": "stream"})["statistics"] == "stream"
    with pytest.raises(VicinalError, match=r"augment: .*hues"):
        real_options({"augment": {"hues": 0.1}})
