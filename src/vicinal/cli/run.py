"""One thin function each for demo, train and evaluate."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vicinal import __version__
from vicinal.adapters.methods import METHODS, servable
from vicinal.adapters.statistics import KINDS
from vicinal.adapters.vnl import Vnl
from vicinal.benchmarks.compare import Entry, compare
from vicinal.benchmarks.demo import (
    HINDSIGHT,
    MORE_STEP_SIZES,
    STEP_SIZES,
    DemoConfig,
    TaskResult,
    best_in_hindsight,
    run_demo,
    smaller,
)
from vicinal.benchmarks.prepare import TrainRequest, prepare_training, roles_for
from vicinal.checkpoint import Trained, load
from vicinal.cli.console import (
    DataDir,
    Device,
    Options,
    Seed,
    SkipBad,
    at_least_one,
    device_named,
    list_bad,
    names_in,
    out,
    pairs,
    ready,
    say,
)
from vicinal.cli.given import given, note_idle
from vicinal.data.catalog import DATASETS
from vicinal.data.streams import STREAMS, StreamSpec
from vicinal.errors import ConfigError
from vicinal.evaluation.record import append_record
from vicinal.report.bars import Bars
from vicinal.report.choices import choice_summary
from vicinal.report.draws import draws_table
from vicinal.report.page import write_report
from vicinal.report.tables import rich_table, summarise
from vicinal.training.config import asked_sureness
from vicinal.training.learner import ALGORITHMS
from vicinal.training.train import train as train_source_model

UNSAFE = frozenset('/\\:*?"<>|')  # in the name of a folder, on one system or another

app = typer.Typer(
    help="Image classifiers that adapt themselves to unseen domains, online and without labels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def demo(
    out_dir: Annotated[Path, typer.Option("--out", help="Where records.jsonl and report.html go.")] = Path(
        "demo-out"
    ),
    device: Device = "cpu",
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option(help="How many seeds, starting at --seed.")] = 3,
    thorough: Annotated[bool, typer.Option("--thorough", help="More step sizes for the baselines.")] = False,
    quick: Annotated[
        bool, typer.Option(help="One seed, hardly any training: only to see that it runs.")
    ] = False,
) -> None:
    """Train on rotated digits and compare every method: no download, about three minutes on two cores."""
    started = time.perf_counter()
    ready(out_dir)
    numbers = tuple(range(seed, seed + at_least_one(seeds, "--seeds")))
    sizes = MORE_STEP_SIZES if thorough else STEP_SIZES
    config = DemoConfig(seeds=numbers, step_sizes=sizes, device=device_named(device))
    results: list[TaskResult] = []
    with Bars(out) as bars:
        run_demo(smaller(config) if quick else config, bars.count, results.append)
    records = [record for result in results for record in result.records]
    path = out_dir / "records.jsonl"
    if path.exists():
        path.replace(path.with_suffix(".jsonl.old"))
    for record in records:
        append_record(path, record)
    shown = best_in_hindsight(records, HINDSIGHT)
    fitted, examples = next((r.fitted, r.examples) for r in results if r.fitted is not None)
    notes = [
        "Sources: digits rotated by 15 to 75 degrees. Targets: 0 and 90 degrees, other digits, never seen.",
        "Step sizes of hard, soft, probabilistic, neighbor and vnl_paper: the best in hindsight on the "
        "targets. The rule, step size and predictor of vnl: chosen on left-out source domains, "
        "with ERM models.",
    ]
    write_report(
        shown,
        examples,
        out_dir / "report.html",
        "vicinal demo: rotated digits",
        notes,
        choices=fitted["choice"]["table"],
    )
    out.print(rich_table(summarise(shown)))
    shifted = [record for record in shown if record.stream == "label_shift"]
    out.print(draws_table(shifted, "Class marginals drawn from Dirichlet(0.5): accuracy % of every stream"))
    for note in notes:
        say(note, style="dim")
    say(f"{len(records)} records in {path}, the page in {out_dir / 'report.html'}")
    say(f"{time.perf_counter() - started:.0f} seconds", style="dim")


@app.command()
def train(
    data: Annotated[
        str, typer.Argument(help=f"{', '.join(DATASETS)}, a folder of domain folders, or a CSV.")
    ],
    target: Annotated[list[str] | None, typer.Option(help="Domain to hold out; may be given again.")] = None,
    backbone: Annotated[str | None, typer.Option(help="small, resnet50_v1, or any timm name.")] = None,
    weights: Annotated[str | None, typer.Option(help="timm, none, or a .safetensors or .pth file.")] = None,
    algorithm: Annotated[str, typer.Option(help=f"How to train: {', '.join(ALGORITHMS)}.")] = "meta",
    iterations: Annotated[
        int | None, typer.Option(help="Default: 200 from scratch, 2000 pretrained.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Images of each of an iteration's two batches.")
    ] = None,
    backbone_lr: Annotated[float | None, typer.Option(help="Peak step size of the features.")] = None,
    size: Annotated[
        int | None, typer.Option(help="Side of the images in pixels; default: the backbone's.")
    ] = None,
    mean: Annotated[
        float | None, typer.Option(help="Normalization mean, if the weights need their own.")
    ] = None,
    std: Annotated[float | None, typer.Option(help="Normalization std, likewise.")] = None,
    second_order: Annotated[bool, typer.Option("--second-order", help="Exact meta gradient.")] = False,
    average: Annotated[
        float, typer.Option(help="Average the weights over this last share of training, as 0.5.")
    ] = 0.0,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the net: a minute to start, faster steps.")
    ] = False,
    no_out_of_fold: Annotated[
        bool, typer.Option("--no-out-of-fold", help="Skip left-out models: vnl by its defaults.")
    ] = False,
    leave_out: Annotated[int, typer.Option(help="Domains a left-out model goes without; 0: decide.")] = 0,
    marginal: Annotated[
        list[float] | None, typer.Option(help="Dirichlet alpha of extra left-out streams; default: 1.")
    ] = None,
    harden: Annotated[
        list[str] | None, typer.Option(help="Transformation of extra left-out streams.")
    ] = None,
    predictor: Annotated[
        list[str] | None,
        typer.Option(help=f"Who may predict, left-out streams decide: {', '.join(Vnl.predicts)}."),
    ] = None,
    calibrate: Annotated[
        str,
        typer.Option(
            help="How sure predictions are: none (as they are), temperature (fitted on left-out streams) or "
            "agreement (with the source model, where these streams take it)."
        ),
    ] = "none",
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Folder of the run; default: runs/NAME.")
    ] = None,
    device: Device = "auto",
    seed: Seed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in --out stopped.")] = False,
    skip_bad: SkipBad = False,
    data_dir: DataDir = None,
    data_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of a named data set, as angles=0,45,90.")
    ] = None,
) -> None:
    """Train on the source domains, simulate the shift on left-out ones, choose the rule of test time."""
    asked = {"iterations": iterations, "batch_size": batch_size, "backbone_lr": backbone_lr}
    training: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    training |= {"algorithm": algorithm, "second_order": second_order, "average": average}
    training |= {"compile": compiled}
    lessons: dict[str, Any] = {"leave_out": leave_out} if leave_out else {}
    lists = {"hardenings": harden, "marginals": marginal, "predictors": predictor}
    lessons |= {name: tuple(values) for name, values in lists.items() if values}
    lessons |= asked_sureness(calibrate)
    if no_out_of_fold and lessons:
        raise ConfigError(
            "--no-out-of-fold leaves out all that --leave-out, --marginal, --harden, --predictor and "
            "--calibrate are about"
        )
    ALGORITHMS[algorithm]
    request = TrainRequest(
        data=data,
        targets=tuple(target or ()),
        backbone=backbone,
        weights=weights,
        size=size,
        mean=None if mean is None else (mean,),
        std=None if std is None else (std,),
        seed=seed,
        skip_bad=skip_bad,
        data_dir=data_dir,
        data_options=pairs(data_option or (), "--data-option"),
        training=training,
        out_of_fold=None if no_out_of_fold else lessons,
    )
    place = device_named(device)
    folder = ready(out_dir or Path("runs") / _run_name(data, target or ()))
    if not resume:
        _unused(folder)
    with Bars(out) as bars:
        prepared = prepare_training(request, lambda done, total: bars.count("decode", "images", done, total))
        trained = train_source_model(
            prepared.spec,
            prepared.roles.sources,
            prepared.config,
            prepared.out_of_fold,
            folder=folder,
            device=place,
            resume=resume,
            progress=bars,
            provenance=prepared.provenance,
        )
    list_bad(prepared.bad)
    out.print(choice_summary(trained))
    say(f"model in {folder / 'model.safetensors'}")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder, or its model.safetensors.")],
    methods: Annotated[
        str, typer.Option(help="Comma-separated, or all that the model can serve.")
    ] = "erm,bn,soft,vnl",
    data: Annotated[str | None, typer.Option(help="Default: what the model was trained with.")] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="Default: the domains held out in training.")
    ] = None,
    statistics: Annotated[str | None, typer.Option(help=f"For every method: {', '.join(KINDS)}.")] = None,
    lr: Annotated[float | None, typer.Option(help="Step size for every method that updates.")] = None,
    option: Options = None,
    stream: Annotated[str, typer.Option(help=f"What arrives: {', '.join(STREAMS)}.")] = "online",
    alpha: Annotated[float, typer.Option(help="Dirichlet parameter of a label-shifted stream.")] = 0.5,
    draws: Annotated[int, typer.Option(help="Streams to draw, with seeds from --seed on.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Images of a test-time batch.")] = 20,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Default: the run's folder.")] = None,
    device: Device = "auto",
    seed: Seed = 0,
    skip_bad: SkipBad = False,
    data_dir: DataDir = None,
) -> None:
    """Adapt along the target's stream with each method; print a table, append to records.jsonl."""
    trained = load(run, device_named(device))
    names = _methods(methods, trained)
    for name in names:
        note_idle(trained, name, statistics, lr if METHODS[name].build.takes_steps else None, option)
    folder = ready(out_dir or (run if run.is_dir() else run.parent))
    entries = [Entry(name, given(name, statistics, lr, option)) for name in names]
    spec = StreamSpec(stream, batch_size, alpha)
    _note_seen(trained, data, target or ())
    records = []
    with Bars(out) as bars:
        roles = roles_for(
            trained,
            data,
            target or (),
            skip_bad=skip_bad,
            decoding=lambda done, total: bars.count("decode", "images", done, total),
            data_dir=data_dir,
        )
        groups = 1 if spec.joint else len(roles.targets)
        total = len(entries) * groups * at_least_one(draws, "--draws")
        for draw in range(draws):
            named = Path(data or trained.provenance.get("dataset", "data")).name
            for result in compare(trained, roles, entries, spec, seed + draw, dataset=named):
                records.append(result.record)
                append_record(folder / "records.jsonl", result.record)
                bars.count("evaluate", result.record.method, len(records), total)
    list_bad(roles.bad)
    out.print(rich_table(summarise(records)))
    say(f"{len(records)} records appended to {folder / 'records.jsonl'}")


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Image classifiers that adapt themselves to unseen domains, online and without labels."""
    if show:
        out.print(__version__)
        raise typer.Exit


def _methods(text: str, trained: Trained) -> list[str]:
    names = servable(trained) if text == "all" else names_in(text)
    for name in names:
        METHODS[name]
    if not names:
        raise ConfigError("--methods is empty: name at least one, or all")
    return names


def _run_name(data: str, targets: Sequence[str]) -> str:
    """Return the name of one folder for a run, whatever its data and domains are called."""
    given_name = Path(data).name
    named = Path(data).resolve().name if given_name in ("", "..") else given_name
    # Domains of a CSV may be called anything: a slash would make folders, and dots lead out of this one.
    signs = (
        "_" if sign in UNSAFE or not sign.isprintable() else sign for sign in "-".join([named, *targets])
    )
    return "".join(signs).lstrip(".") or "run"


def _unused(folder: Path) -> None:
    """Raise if a folder holds a model, or a training that has not come to its end."""
    if (folder / "model.safetensors").exists():
        raise ConfigError(f"{folder} already holds a model: choose another --out, or pass --resume")
    if any(folder.glob("**/state-*.safetensors")):
        raise ConfigError(
            f"{folder} holds a training that was stopped: go on with --resume, or choose another --out"
        )


def _note_seen(trained: Trained, data: str | None, targets: Sequence[str]) -> None:
    """Say so if a target is a domain that the model was trained on, or is called like one."""
    facts = trained.provenance
    same = data is None or facts.get("dataset") in (data, str(Path(data).resolve()))
    if not same and data in DATASETS:
        return
    for target in targets:
        if target in facts.get("sources", []):
            which = f"'{target}': its" if same else f"a domain '{target}': if it is this one, its"
            say(
                f"the model was trained on {which} figures are not those of a domain it never saw",
                style="yellow",
            )
