"""`uneven export`: a run's checkpoint as a plain Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

from uneven.checkpoint.folder import newest
from uneven.cli.console import plain_console
from uneven.errors import CheckpointRefused
from uneven.train.records import TOKENIZER

export_app = typer.Typer()


@export_app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that has checkpoints.")],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The new folder; it must be absent or empty.")],
    step: Annotated[int | None, typer.Option(help="The step of the checkpoint; by default the last one.")] = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder, which transformers and others load as it is."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise CheckpointRefused(f"--to {to}: exists already; give a folder that is new or empty")
    checkpoint = newest(run, step=step)
    console = plain_console()
    with console.status("loading torch") as status:
        # Here and not at the top: errors should not wait for it.
        from uneven.checkpoint.to_folder import export_checkpoint

        def show(done: int, total: int) -> None:
            status.update(f"writing {to}: {done / 1e6:,.0f} of {total / 1e6:,.0f} million parameters")

        export_checkpoint(checkpoint, to, extras=run / TOKENIZER, progress=show)
    manifest = checkpoint.manifest
    console.print(
        f"{to}: step {manifest.step} of {run}, {manifest.structure.family}, "
        f"{manifest.structure.num_parameters:,} parameters in {manifest.dtype}",
        markup=False,
        soft_wrap=True,
    )
