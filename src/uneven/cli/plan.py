"""`uneven plan`: look at a plan, in numbers and as a picture."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from uneven.cli.console import plain_console
from uneven.draw import KV_HEADS, Held, Holding, draw_plan, holdings_of
from uneven.layout import ParallelPlan, read_plan

plan_app = typer.Typer(no_args_is_help=True)


@plan_app.callback()
def plan() -> None:
    """Look at plans: who holds what."""


@plan_app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan, as a run's folder holds it.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The picture, .png or .svg; default: a .png beside the plan.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON; a picture is written only with --out.")
    ] = False,
) -> None:
    """Print what each device of a plan holds, and draw it."""
    found = read_plan(file)
    if as_json:
        typer.echo(json.dumps(numbers_of(found), indent=1))
    else:
        _print(found)
    if out is None and as_json:
        return
    picture = out or file.with_suffix(".png")
    draw_plan(found, picture)
    typer.echo(f"picture: {picture}", err=as_json)


def numbers_of(plan: ParallelPlan) -> dict[str, Any]:
    """What `show` says, as JSON: the job, its replicas, and what each of their devices holds."""
    holdings = {holding.device: holding for holding in holdings_of(plan)}
    whole = plan.structure.num_parameters
    return {
        "family": plan.structure.family,
        "num_parameters": whole,
        "num_replicas": len(plan.replicas),
        "num_devices": len(plan.devices),
        "total_batch_shares": sum(replica.batch_share for replica in plan.replicas),
        "replicas": [
            {
                "batch_share": replica.batch_share,
                "devices": [_holding_to_json(holdings[device], whole=whole) for device in replica.layout.devices],
            }
            for replica in plan.replicas
        ],
    }


def _holding_to_json(holding: Holding, *, whole: int) -> dict[str, Any]:
    axes = {name: {"least": held.least, "most": held.most, "total": held.total} for name, held in holding.axes.items()}
    return {
        "device": holding.device,
        **axes,
        "num_parameters": holding.num_parameters,
        "fraction_of_model": holding.num_parameters / whole,
        "num_gradient_groups": holding.num_gradient_groups,
    }


def _print(plan: ParallelPlan) -> None:
    console = plain_console()
    structure = plan.structure
    size = f"{structure.num_parameters:,} parameters"
    counts = f"{_count(len(plan.replicas), 'replica')}, {_count(len(plan.devices), 'device')}"
    console.print(Text(f"{structure.family}, {size}, {counts}"))
    holdings = {holding.device: holding for holding in holdings_of(plan)}
    shares = sum(replica.batch_share for replica in plan.replicas)
    for index, replica in enumerate(plan.replicas):
        devices = replica.layout.devices
        title = f"replica {index}: {_count(len(devices), 'device')}, batch share {replica.batch_share} of {shares}"
        console.print()
        console.print(Text(title, style="bold"))
        console.print(_table([holdings[device] for device in devices], whole=structure.num_parameters))


def _table(held: list[Holding], *, whole: int) -> Table:
    titles = {"heads": "heads", KV_HEADS: "KV heads", "mlp": "mlp channels", "vocab": "vocab rows"}
    axes = sorted(held[0].axes, key=lambda name: [*titles, name].index(name))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns = [titles.get(name, name) for name in axes]
    for title in ("device", *columns, "parameters", "of model", "gradient groups"):
        table.add_column(title, justify="right")
    for holding in held:
        shares = [_share(holding.axes[name]) for name in axes]
        parameters = (f"{holding.num_parameters:,}", f"{holding.num_parameters / whole:.1%}")
        table.add_row(f"{holding.device}", *shares, *parameters, f"{holding.num_gradient_groups}")
    return table


def _share(held: Held) -> str:
    some = f"{held.least:,}" if held.least == held.most else f"{held.least:,}-{held.most:,}"
    return f"{some} of {held.total:,}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
