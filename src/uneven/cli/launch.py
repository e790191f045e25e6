"""`uneven launch`: the same command on each of several hosts makes one job of them."""

from typing import Annotated

import typer

from uneven.cli.train import train
from uneven.errors import ConfigError
from uneven.launch.meet import Meeting
from uneven.launch.site import Place

DEFAULT_PORT = 29400

launch_app = typer.Typer(no_args_is_help=True)


@launch_app.callback()
def launch(
    context: typer.Context,
    nnodes: Annotated[int, typer.Option(min=1, help="How many hosts the job has.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Which of them this is; host 0 writes the run's folder.")] = 0,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where the others find host 0; by default port 29400.")
    ] = None,
    rdzv_id: Annotated[str, typer.Option(help="A name that tells this job from others at the same place.")] = "",
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, help="Devices of this host; by default an equal part of the plan's.")
    ] = None,
    local_addr: Annotated[
        str | None, typer.Option(help="Address, or network interface, at which the other hosts reach this one.")
    ] = None,
) -> None:
    """Run a command on several hosts as one job: once on each, with the same arguments and another --node-rank."""
    if node_rank >= nnodes:
        raise ConfigError(f"--node-rank is {node_rank}, but --nnodes is {nnodes}; hosts count from 0")
    if nnodes > 1 and rdzv_endpoint is None:
        raise ConfigError(f"--nnodes is {nnodes}: --rdzv-endpoint must say where the others find host 0")
    host, port = parse_endpoint(rdzv_endpoint) if nnodes > 1 and rdzv_endpoint else ("127.0.0.1", 0)
    context.obj = Place(Meeting(node_rank, nnodes, host, port, job_id=rdzv_id), nproc_per_node, local_addr)


launch_app.command()(train)


def parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port of "node01:29400", "node01" or "[fd00::1]:29400"."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    if not host.strip("[]") or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"--rdzv-endpoint {text}: expected a host and a port, as in node01:29400")
    return host.strip("[]"), int(port)
