"""The documentation of every test-time method, written from its docstring, settings and traits.

python -m vicinal.report.methods docs/methods
"""

import inspect
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.methods import METHODS, Method
from vicinal.adapters.settings import Settings


def index_page() -> str:
    """Return the table of all methods."""
    head = (
        "method",
        "paper",
        "updates",
        "source data",
        "training",
        "batch of one",
        "norm layers",
        "passes a batch",
    )
    lines = [
        "# Test-time methods",
        "",
        'Each is `vicinal.adapt(model, "name")` and runs on batch, source, blended, stream or balanced',
        "statistics, its own paper's choice being the default. Written from the code by `make docs`.",
        "",
        "The average over the stream starts from the source's statistics. On batch statistics a batch of one",
        "joins an average over those that came alone, since larger batches are normalized by themselves. On",
        "stream and balanced statistics a method that predicts before its update takes a forward pass more.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for name in sorted(METHODS):
        traits = METHODS[name].traits
        cells = (
            f"[`{name}`]({name}.md)",
            traits.paper,
            traits.updates,
            traits.source_data,
            traits.training,
            traits.batch_of_one,
            traits.norms,
            traits.passes,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def method_page(name: str) -> str:
    """Return the page of one method: its docstring, its defaults, its traits."""
    method = METHODS[name]
    text = inspect.cleandoc(method.build.__doc__ or "")
    traits = [
        f"- {field.name.replace('_', ' ')}: {getattr(method.traits, field.name)}"
        for field in fields(method.traits)
    ]
    defaults = [f"| `{key}` | {value} |" for key, value in _defaults(method)]
    return "\n".join(
        [
            f"# {name}",
            "",
            text,
            "",
            *[line for line in traits if not line.endswith(": ")],
            "",
            "| setting | default |",
            "|---|---|",
            *defaults,
            "",
        ]
    )


def _defaults(method: Method) -> list[tuple[str, str]]:
    """Return what a method starts from where it differs from every other's start, and what is its own."""
    plain = Settings()
    shown = []
    for field in fields(method.defaults):
        value = getattr(method.defaults, field.name)
        own = not hasattr(plain, field.name)
        if own or value != getattr(plain, field.name) or field.name in ("statistics", "predict", "lr"):
            shown.append((field.name, _text(value)))
    return shown


def _text(value: Any) -> str:
    if is_dataclass(value) and hasattr(value, "kind"):
        return str(value.kind)
    return str(value).replace("|", "\\|")


def write_pages(folder: Path) -> None:
    """Write the index and a page for each method."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(index_page(), encoding="utf-8")
    for name in METHODS:
        (folder / f"{name}.md").write_text(method_page(name), encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
