from collections.abc import Callable

from rich.console import Console

from vicinal.evaluation.record import Record
from vicinal.report.draws import draws_table

MakeRecord = Callable[..., Record]


def test_a_method_that_chose_who_predicts_has_one_column_without_holes(make: MakeRecord) -> None:
    records = [
        make(method="bn", statistics="batch", predict="own", seed=0, accuracy=0.5),
        make(method="bn", statistics="batch", predict="own", seed=1, accuracy=0.6),
        make(method="vnl", statistics="stream", predict="own", seed=0, accuracy=0.7),
        make(method="vnl", statistics="stream", predict="labels", seed=1, accuracy=0.8),
    ]
    table = draws_table(records, "draws")
    assert [column.header for column in table.columns] == ["draw", "target", "bn", "vnl"]
    console = Console(width=80)
    with console.capture() as caught:
        console.print(table)
    text = caught.get()
    assert all(figure in text for figure in ("50.0", "60.0", "70.0", "80.0"))
    assert "NaN" not in text
