"""Requests to a running job, as files in its folder: whoever may write there may ask. Loads no torch.

A request appears whole, under a name of its own, and is gone once the launcher has taken it.
"""

import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FOLDER = "requests"
"""Where requests lie in a run's folder."""
SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Request:
    """That a device leave at the next step boundary, or that its process be started again."""

    action: Literal["drain", "join"]
    device: int


def put(run: Path, request: Request) -> Path:
    """Ask the launcher of a run; returns the file, which is gone once it has been taken. Raises OSError."""
    folder = run / FOLDER
    name = f"{time.time_ns()}-{uuid.uuid4().hex}"
    draft = folder / f".{name}"
    draft.write_text(json.dumps(asdict(request)))
    file = folder / f"{name}{SUFFIX}"
    os.replace(draft, file)
    return file


def take(run: Path) -> Iterator[Request]:
    """What has been asked since the last time, in order; what is no request is left out."""
    folder = run / FOLDER
    names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX)) if folder.is_dir() else []
    for name in names:
        text = (folder / name).read_text()
        (folder / name).unlink()
        try:
            found = json.loads(text)
            request = Request(found["action"], found["device"])
        except (ValueError, KeyError, TypeError):
            continue
        if request.action in ("drain", "join") and type(request.device) is int:
            yield request
