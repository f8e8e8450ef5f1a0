"""The rooms of the package: imports point down only, and each kind of thing keeps to its own room."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "vicinal"
PUBLIC = "__init__"
GROUND = ("registry", "types", "errors", "fields", "versions", "graphs", "kernels")
# From the roof down; a room may import itself and any room below it.
ROOMS = (
    "cli",
    PUBLIC,
    "report",
    "benchmarks",
    "evaluation",
    "training",
    "adapters",
    "checkpoint",
    "data",
    "models",
    "functional",
)
FLOOR = {room: len(ROOMS) - index for index, room in enumerate(ROOMS)} | dict.fromkeys(GROUND, 0)
FLOOR["__main__"] = len(ROOMS) + 1
MAY_PRINT = ("cli", "report")
LABEL_FREE = ("training", "adapters")
SOURCES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def absolute(node: ast.ImportFrom, package: tuple[str, ...]) -> tuple[str, ...]:
    """Return the dotted module a from-import names, relative ones resolved against the importer's package."""
    own = tuple(node.module.split(".")) if node.module else ()
    return own if not node.level else (*package[: len(package) - node.level + 1], *own)


def imported_modules(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield every module imported anywhere: in functions, under TYPE_CHECKING, and by name at run time."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node, package)
            yield from ((*module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            named = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            yield from (tuple(str(name).split(".")) for name in named[:1])


def imported_rooms(tree: ast.Module, package: tuple[str, ...] = ("vicinal",)) -> set[str]:
    """Return the rooms a file imports; a public name taken from the package itself counts as the package."""
    found = set()
    for module in imported_modules(tree, package):
        if module[0] == "vicinal":
            found.add(module[1] if len(module) > 1 and module[1] in FLOOR else PUBLIC)
    return found


def upward_imports(tree: ast.Module, room: str, package: tuple[str, ...] = ("vicinal",)) -> set[str]:
    together = {room, *GROUND} if room in GROUND else {room}
    return {other for other in imported_rooms(tree, package) - together if FLOOR[other] >= FLOOR[room]}


def prints(tree: ast.Module) -> bool:
    """Return whether a file prints: by print() or through the standard streams."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            return True
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout", "sys.stderr"):
            return True
    return False


def more_than_names(tree: ast.Module) -> list[str]:
    """Return the statements that are neither a docstring, an import, `__all__` nor `__version__`."""
    rest = []
    for index, node in enumerate(tree.body):
        docstring = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        listed = isinstance(node, ast.Assign) and all(
            isinstance(target, ast.Name) and target.id in ("__all__", "__version__")
            for target in node.targets
        )
        if not (docstring or listed or isinstance(node, ast.Import | ast.ImportFrom)):
            rest.append(ast.unparse(node))
    return rest


def names_used(tree: ast.Module) -> set[str]:
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.alias):
            used.add(node.name.rpartition(".")[2])
        elif isinstance(node, ast.arg):
            used.add(node.arg)
    return used


def named(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_every_file_is_in_a_known_room_and_imports_point_down(path: Path) -> None:
    room = room_of(path)
    assert room in FLOOR, f"{named(path)} is in no room: give '{room}' a place in the order of the rooms"
    package = ("vicinal", *path.relative_to(PACKAGE).parts[:-1])
    up = upward_imports(parse(path), room, package)
    assert not up, f"{named(path)} imports {', '.join(sorted(up))}, which stands above {room}"


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_only_the_command_line_and_the_report_print(path: Path) -> None:
    if room_of(path) not in MAY_PRINT:
        assert not prints(parse(path)), f"{named(path)} prints: return the text, or move it up"


@pytest.mark.parametrize("path", [path for path in SOURCES if room_of(path) in LABEL_FREE], ids=named)
def test_target_labels_cannot_be_reached_from_training_and_adapters(path: Path) -> None:
    forbidden = names_used(parse(path)) & {"Roles", "assign_roles", "answers"}
    assert not forbidden, f"{named(path)} uses {', '.join(sorted(forbidden))}: answers are for metrics only"


def test_the_package_itself_holds_public_names_and_nothing_else() -> None:
    tree = parse(PACKAGE / "__init__.py")
    assert more_than_names(tree) == []
    listed = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    names = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    public = {name for value in listed if isinstance(value, list | tuple) for name in value}
    assert names - {"__version__"} <= public, "a name that is imported but not in __all__ is not public"


def test_no_file_is_a_drawer_for_everything() -> None:
    drawers = [
        named(path)
        for path in SOURCES
        if {"utils", "util"} & {path.stem, *path.parent.relative_to(PACKAGE).parts}
    ]
    assert not drawers


@pytest.mark.parametrize(
    ("room", "source", "up"),
    [
        ("functional", "from vicinal.models.small import Norm", {"models"}),
        ("functional", "import vicinal.data.streams", {"data"}),
        ("models", "from vicinal import checkpoint", {"checkpoint"}),
        ("models", "from ..training.meta import Generalized", {"training"}),
        ("models", "from .. import adapters", {"adapters"}),
        ("adapters", "def late():\n    from vicinal.training import meta", {"training"}),
        ("data", "if TYPE_CHECKING:\n    from vicinal.evaluation.record import Record", {"evaluation"}),
        ("data", "importlib.import_module('vicinal.adapters.vnl')", {"adapters"}),
        ("training", "from vicinal import adapt", {PUBLIC}),
        (PUBLIC, "from vicinal.cli import main", {"cli"}),
        ("errors", "from vicinal.functional.labels import class_means", {"functional"}),
        ("models", "from vicinal.functional import labels\nfrom . import small\nimport torch", set()),
        ("registry", "from vicinal.errors import UnknownNameError", set()),
        ("cli", "import vicinal\nfrom vicinal.report.page import write_report", set()),
        ("data", "import vicinalia.cli", set()),
    ],
)
def test_the_check_itself_sees_every_form_of_import(room: str, source: str, up: set[str]) -> None:
    assert upward_imports(ast.parse(source), room, ("vicinal", room)) == up


def test_the_check_itself_sees_prints_and_definitions() -> None:
    assert prints(ast.parse("def f():\n    print(1)"))
    assert prints(ast.parse("sys.stderr.write('x')"))
    assert not prints(ast.parse("def fingerprint(x):\n    return blueprint(x)"))
    assert more_than_names(ast.parse("'doc'\nfrom a import b\n__all__ = ['b']")) == []
    assert len(more_than_names(ast.parse("def f(): ...\nclass C: ...\nx = 1\nb()"))) == 4
    assert names_used(ast.parse("def f(answers): return roles.answers")) >= {"answers", "roles"}
