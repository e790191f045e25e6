"""What of a job must be the same on every host: its settings, plan, model and data, as short texts. Loads no torch.

Where things lie may differ from host to host; what they contain may not.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from uneven.train.job import Design, Job

OF_ITS_HOST = frozenset(
    {"model", "tokenizer", "data.paths", "data.heldout_paths", "data.cache", "parallel", "launch.threads"}
)
"""Keys that name places or the means of a host; and the division, which the plan says in full."""
EDGE_BYTES = 2**20


def design_fingerprint(design: Design) -> dict[str, str]:
    """Everything that is decided before the data are read."""
    plan = design.plan
    degrees = " + ".join(str(len(replica.layout.devices)) for replica in plan.replicas)
    weights = "random" if design.weights is None else _weights(design.weights)
    return {
        **{key: json.dumps(value) for key, value in _settings(design.config.model_dump(mode="json"))},
        "plan": f"{degrees} devices, digest {_digest(plan.dumps())}",
        "model": f"{design.spec.family}, digest {_digest(json.dumps(design.spec.config, sort_keys=True))}",
        "weights": weights,
        "tokenizer": f"{design.tokenizer.vocab_size} tokens, digest {design.tokenizer.fingerprint[:16]}",
    }


def data_fingerprint(job: Job) -> dict[str, str]:
    """What the sequences are cut from."""
    corpora = {"corpus": job.corpus} | ({} if job.heldout is None else {"held-out corpus": job.heldout})
    streams = {"tokens": job.dataset.train.stream, "held-out tokens": job.dataset.heldout.stream}
    return {
        name: f"{len(corpus.documents)} documents, {corpus.num_bytes} bytes, digest {corpus.fingerprint[:16]}"
        for name, corpus in corpora.items()
    } | {name: f"{stream.num_tokens}, digest {stream.fingerprint[:16]}" for name, stream in streams.items()}


def _settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in OF_ITS_HOST:
            continue
        if isinstance(value, Mapping):
            yield from _settings(value, f"{key}.")
        else:
            yield key, value


def _weights(folder: Path) -> str:
    """Size and both ends of each file: all of it would take as long as loading it."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(f"{path.name} {size} ".encode() + file.read(EDGE_BYTES))
            file.seek(max(0, size - EDGE_BYTES))
            digest.update(file.read())
    return f"digest of file ends {digest.hexdigest()[:16]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
