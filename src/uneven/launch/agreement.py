"""What must be the same on every host, and what to say if it is not. Loads no torch."""

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from uneven.errors import ConfigError
from uneven.launch.peers import Peers

TOLD = 6
"""Differences that a message lists."""


def agree(peers: Peers, values: Mapping[str, str]) -> None:
    """Go on if all launchers pass the same values, by what they are called; ConfigError on all of them otherwise."""
    names = [peers.name(index) for index in range(peers.count)]
    found = differences(peers.exchange(dict(values)), names=names)
    if found:
        more = f"\n... and {len(found) - TOLD} more" if len(found) > TOLD else ""
        raise ConfigError(f"{peers.kind}s differ in what must be the same:\n" + "\n".join(found[:TOLD]) + more)


def differences(found: Sequence[Mapping[str, str]], *, names: Sequence[str]) -> list[str]:
    """For each value that is not the same everywhere, what it is at the first and at the first other that differs."""
    told = []
    for key in dict.fromkeys(key for values in found for key in values):
        first = found[0].get(key, "nothing")
        for values, name in zip(found[1:], names[1:], strict=True):
            if values.get(key, "nothing") != first:
                told.append(f"{key}: {first} on {names[0]}, {values.get(key, 'nothing')} on {name}")
                break
    return told


def code_fingerprint() -> dict[str, str]:
    """Versions, and a digest of this package's files."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".json")):
        digest.update(f"{path.relative_to(package)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    versions = {f"version of {name}": version(name) for name in ("uneven", "torch", "transformers")}
    return {**versions, "source code of uneven": f"digest {digest.hexdigest()[:16]}"}
