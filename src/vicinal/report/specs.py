"""The specs of the paper's tables as a table of their own."""

from collections.abc import Iterable

from vicinal.benchmarks.spec import Setting, Spec


def specs_markdown(specs: Iterable[Spec]) -> str:
    """Return one line for each spec, as docs/reproduce.md has it: command, what, place in the paper, data."""
    lines = ["| command | what | in the paper | data |", "|---|---|---|---|"]
    for spec in specs:
        names = " or ".join(f"`{name}`" for name in (f"vicinal reproduce {spec.name}", *spec.aliases))
        lines.append(f"| {names} | {spec.title} | {spec.paper} | {_data(spec.settings)} |")
    return "\n".join(lines)


def _data(settings: Iterable[Setting]) -> str:
    """Return the data sets and the weights that columns need."""
    settings = list(settings)
    needed = [f"`{name}`" for name in dict.fromkeys(setting.data for setting in settings)]
    pretrained = dict.fromkeys(s.backbone for s in settings if s.weights == "timm")
    return ", ".join([*needed, *(f"weights of `{name}`" for name in pretrained)])
