"""The commands."""

from importlib.metadata import version
from typing import Annotated

import typer

from uneven.cli.goodput import goodput_app
from uneven.cli.launch import launch_app
from uneven.cli.membership import membership_app
from uneven.cli.plan import plan_app
from uneven.cli.train import train_app

app = typer.Typer(
    name="uneven",
    help="Train language models on hardware that is not uniform, by nonuniform tensor parallelism.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(train_app)
app.add_typer(membership_app)
app.add_typer(launch_app, name="launch")
app.add_typer(plan_app, name="plan")
app.add_typer(goodput_app)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"uneven {version('uneven')}")
        raise typer.Exit


@app.callback()
def uneven(
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    """Train language models on hardware that is not uniform, by nonuniform tensor parallelism."""
