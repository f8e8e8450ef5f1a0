"""What was chosen on left-out domains, for a terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vicinal.checkpoint import Trained


def choice_summary(trained: Trained) -> Group:
    """Return a line on the source model and the table behind the choice of the rule."""
    facts = trained.provenance
    accuracy = facts.get("validation_accuracy")
    shown = "unknown" if accuracy is None else f"{accuracy:.1%}"
    line = Text(f"{trained.backbone}, {trained.algorithm}: source validation accuracy {shown}")
    rows = trained.choice.get("table", [])
    if not rows:
        return Group(line)
    table = Table(title="Simulated online adaptation on left-out source domains", title_justify="left")
    for name in ("method", "update", "lr", "start", "statistics", "predict"):
        table.add_column(name)
    for name in ("accuracy", "worst stream", "NLL"):
        table.add_column(name, justify="right")
    for row in rows:
        lr, start = f"{row['lr']:.0e}", "from rest" if row.get("from_rest") else "at once"
        if row["update"] == "none":
            lr = start = "-"
        cells = [row["method"], row["update"], lr, start, row["statistics"], row["predict"]]
        cells += [f"{row['accuracy']:.1%}", f"{row['worst']:.1%}", f"{row['nll']:.3f}"]
        table.add_row(*cells, style="bold" if row["chosen"] else "")
    return Group(line, table, *_doubt_line(trained.choice), *_sureness_line(trained.choice))


def _doubt_line(choice: Mapping[str, Any]) -> list[Text]:
    """Return what is known of doubts, where the rule heeds them."""
    rule = choice.get("methods", {}).get("vnl", {}).get("stream", {})
    if rule.get("update") != "marginal" or rule.get("doubt") is None:
        return []
    return [
        Text(f"vnl takes shorter steps where its source model doubts less than {rule['doubt']:.3f}, as here")
    ]


def _sureness_line(choice: Mapping[str, Any]) -> list[Text]:
    """Return how sure vnl is of what it predicts, where left-out streams were asked."""
    rule = choice.get("methods", {}).get("vnl", {}).get("stream", {})
    if rule.get("agreement"):
        return [Text("vnl is as sure of its predictions as they agree with its source model")]
    if "output_temperature" not in rule:
        return []
    return [Text(f"vnl divides its logits by {rule['output_temperature']:.2f} to be as sure as it may be")]
