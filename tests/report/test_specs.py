from vicinal.benchmarks.spec import Setting, Spec
from vicinal.report.specs import specs_markdown


def test_a_line_names_command_place_data_and_weights_once_each() -> None:
    columns = (
        Setting("A", "pacs", backbone="resnet18", weights="timm"),
        Setting("B", "pacs", backbone="resnet50", weights="timm"),
        Setting("C", "digits", backbone="small", weights="none"),
    )
    numbered = Spec("one", "A title", paper="Table 3", settings=columns, aliases=("table3", "figure1"))
    plain = Spec("two", "Another", settings=columns[2:])
    assert specs_markdown([numbered, plain]).splitlines()[2:] == [
        "| `vicinal reproduce one` or `table3` or `figure1` | A title | Table 3 "
        "| `pacs`, `digits`, weights of `resnet18`, weights of `resnet50` |",
        "| `vicinal reproduce two` | Another |  | `digits` |",
    ]
