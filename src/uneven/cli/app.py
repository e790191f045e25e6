"""The commands."""

import typer

from uneven.cli.launch import launch_app
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
app.add_typer(launch_app, name="launch")
app.add_typer(plan_app, name="plan")
