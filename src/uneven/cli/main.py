"""The command line. Exit codes: 0 done, 2 the user's mistake, 1 anything else."""

import sys

import typer

from uneven.cli.plan import plan_app
from uneven.cli.train import train_app
from uneven.errors import InputError, UnevenError

app = typer.Typer(
    name="uneven",
    help="Train language models on hardware that is not uniform, by nonuniform tensor parallelism.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(train_app)
app.add_typer(plan_app, name="plan")


def main() -> None:
    """Run the command line; an error of this package becomes one message and an exit code."""
    try:
        app()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except UnevenError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
