"""`vicinal adapt`: images in, predictions out, by a model that adapts itself along the way."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from vicinal.adapters.guard import Guarded
from vicinal.adapters.methods import METHODS, adapt
from vicinal.adapters.statistics import KINDS
from vicinal.checkpoint import load, save
from vicinal.cli.console import (
    Device,
    Options,
    Seed,
    SkipBad,
    at_least_one,
    device_named,
    list_bad,
    ready,
    say,
)
from vicinal.cli.console import out as console
from vicinal.cli.given import given, note_idle
from vicinal.data.files import printable, strangers
from vicinal.errors import ConfigError
from vicinal.evaluation.folder import WHOLE, PredictionFile, adapted, predict_folder
from vicinal.report.bars import Bars

MODEL = "model.safetensors"


def adapt_command(
    checkpoint: Annotated[Path, typer.Argument(help="A run's folder, or its model.safetensors.")],
    folder: Annotated[Path, typer.Argument(help="A folder of images, in any depth; no labels needed.")],
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "vnl",
    statistics: Annotated[str | None, typer.Option(help=f"{', '.join(KINDS)}.")] = None,
    lr: Annotated[
        float | None, typer.Option(help="Step size; default: what was chosen on source domains.")
    ] = None,
    option: Options = None,
    batch_size: Annotated[int, typer.Option(help="Images adapted to at once.")] = 20,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Images arrive by name, as where names are times; else drawn.")
    ] = False,
    out_dir: Annotated[Path, typer.Option("--out", help="Where predictions.csv goes.")] = Path("adapted"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the predictions.csv of an earlier run in --out.")
    ] = False,
    save_model: Annotated[bool, typer.Option("--save-model", help="Also write the adapted model.")] = False,
    no_guard: Annotated[
        bool, typer.Option("--no-guard", help="Adapt without a guard against collapse.")
    ] = False,
    device: Device = "auto",
    seed: Seed = 0,
    skip_bad: SkipBad = False,
) -> None:
    """Adapt to a folder of images and write a label, its probability and the entropy for each.

    Images arrive in an order drawn by --seed: where names go by class, each batch would be of one class, and
    methods that adapt online are misled by that. For methods that draw the latent classifier w there is a
    spread over the draws as well. Predictions are written as they come: where it is interrupted or meets a
    bad image, those it has made are in predictions.partial.csv.
    """
    METHODS[method]
    size = at_least_one(batch_size, "--batch-size")
    _require_free(out_dir, overwrite, save_model)
    trained = load(checkpoint, device_named(device))
    adapter = adapt(trained, method, **{"seed": seed, **given(method, statistics, lr, option)})
    note_idle(trained, method, statistics, lr, option)
    guarded, rows = None if no_guard else Guarded(adapter), PredictionFile(out_dir)
    with _terminated_as_interrupted():
        try:
            with Bars(console) as bars:
                result = predict_folder(
                    guarded or adapter,
                    trained,
                    folder,
                    size,
                    seed=None if in_order else seed,
                    skip_bad=skip_bad,
                    progress=lambda done, total: bars.count("adapt", method, done, total),
                    keep=rows.add,
                )
        except Exception:
            _say_partial(rows)
            raise
        list_bad(result.bad)
        _say_strangers(folder)
        if guarded is not None:
            say(guarded.report(), style="yellow" if guarded.events else "dim")
        if result.left:
            _say_partial(rows)
            raise KeyboardInterrupt(f"interrupted: {result.left} images are left, and no model was saved")
        rows.finish()
        say(f"{len(result.predictions)} predictions in {rows.whole}")
        if save_model:
            save(out_dir / MODEL, adapted(trained, adapter, result.last))


def _require_free(folder: Path, overwrite: bool, save_model: bool) -> None:
    """Raise if something that is worth keeping would be replaced in a folder, or if it takes no files."""
    ready(folder)
    if save_model and (folder / MODEL).exists():
        raise ConfigError(f"--save-model would replace {folder / MODEL}: choose another --out")
    if not overwrite and (folder / WHOLE).exists():
        raise ConfigError(
            f"{folder / WHOLE} is there from an earlier run: choose another --out, or pass --overwrite"
        )


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM, by which a scheduler or a shutdown ends a process, as Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say_partial(rows: PredictionFile) -> None:
    """Keep what was predicted before the end and say where it is, if there is any."""
    if count := rows.stop():
        say(f"{count} predictions in {rows.partial}")


def _say_strangers(folder: Path) -> None:
    """Say how many files of a folder do not look like images."""
    found = list(strangers(folder))
    if found:
        name = printable(found[0].relative_to(folder))
        say(f"{len(found)} files without the suffix of an image were left out, as {name}")
