"""Every setting of a training job, with its default and its limits. The field names are the keys of the TOML file."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, field_validator

from uneven.layout import Copies

Precision = Literal["bf16", "fp32", "fp64"]
PositiveInt = Annotated[int, Field(ge=1, strict=True)]
Degree = Annotated[int, Field(ge=1, le=65536, strict=True)]
Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
LR_OF_RANDOM_WEIGHTS, LR_OF_GIVEN_WEIGHTS = 6e-3, 2e-5
"""Peaks of the learning rate: 6e-3 suits models of a few million parameters, and would ruin what others have learnt."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | int | float) else value


def _check_copies(value: Any) -> Any:
    if value != "all" and (type(value) is not int or value < 1):
        raise ValueError("input should be a whole number of at least 1, or 'all'")
    return value


def _parse_bytes(value: Any) -> Any:
    """Bytes of "24GB", "1.5 GiB" or "800MB"."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kMGT]?)(i?)B", value.strip())
    if found is None:
        raise ValueError("input should be a number of bytes, or as in '24GB' or '1.5GiB'")
    number, prefix, is_binary = found.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** " kMGT".index(prefix or " "))


ByteCount = Annotated[PositiveInt, BeforeValidator(_parse_bytes)]


class Section(BaseModel):
    """A group of keys; unknown ones are an error, and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSection(Section):
    """`paths`: files, folders and globs; none means the source of Python's standard library.

    In files of records, each has a text in `text_field` or the messages of a conversation in `messages_field`.
    """

    paths: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    heldout_paths: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    holdout: float = Field(default=0.05, gt=0, lt=1)
    text_field: str = "text"
    messages_field: str = "messages"
    restart_at_documents: bool = True
    cache: Path = Path("~/.cache/uneven")


class TrainSection(Section):
    """`global_batch` counts sequences a step over all replicas, `micro_batch` those of one forward pass of a replica.

    `clip` bounds the global gradient norm; infinity leaves it alone. A step with non-finite gradients is skipped;
    after `max_nonfinite` such steps in a row the job stops. Where `lr` is not given, it suits the weights that training
    starts from, see `TrainConfig.with_learning_rate`; `min_lr` is a twentieth of it. `recompute` keeps only the inputs
    of layers and computes their activations again in backward; `compile` runs the model through `torch.compile`.
    `optimizer_copies` is the number of replicas that keep each part of the optimizer's state, of as many as there are.
    """

    steps: PositiveInt = 500
    seq_len: PositiveInt = 128
    global_batch: PositiveInt = 9
    micro_batch: PositiveInt = 6
    lr: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    min_lr: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    warmup_steps: int = Field(default=25, ge=0, strict=True)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    clip: float = Field(default=1.0, gt=0)
    optimizer_copies: Annotated[Copies, PlainValidator(_check_copies)] = 2
    precision: Precision = "fp32"
    max_nonfinite: PositiveInt = 5
    recompute: bool = False
    compile: bool = False
    bucket_bytes: PositiveInt = 25 * 2**20


class ParallelSection(Section):
    """The division: `replicas` as degrees, `shares` of the devices in each replica, or a `plan` file.

    `batch_shares` weighs the replicas in the global batch; by default a replica counts by its devices. `experts` of
    a mixture are divided by `width`, each device a part of every expert, or `whole`.
    """

    replicas: Annotated[tuple[Degree, ...], BeforeValidator(_as_list)] | None = Field(default=None, min_length=1)
    shares: tuple[tuple[Share, ...], ...] | None = Field(default=None, min_length=1)
    batch_shares: Annotated[tuple[PositiveInt, ...], BeforeValidator(_as_list)] | None = None
    plan: Path | None = None
    experts: Literal["width", "whole"] | None = None


class EvalSection(Section):
    """At the end, and after every `every` steps if that is not 0, the loss is taken on the first `sequences` held-out
    sequences.

    With `reload`, the saved folder is loaded by plain transformers and evaluated on the same sequences.
    """

    every: int = Field(default=0, ge=0, strict=True)
    sequences: PositiveInt = 64
    reload: bool = True


class SampleSection(Section):
    """Text generated by the saved model at the end; `tokens = 0` leaves it out."""

    prompt: str = "def "
    tokens: int = Field(default=160, ge=0, strict=True)
    temperature: float = Field(default=0.7, ge=0, le=100)

    @field_validator("temperature")
    @classmethod
    def _not_tiny(cls, value: float) -> float:
        if 0 < value < 1e-3:
            raise ValueError("input should be 0 or at least 0.001")
        return value


class LogSection(Section):
    """`samples` adds the ids of the samples used to each line of the metrics.

    `tensorboard` writes what the metrics say as TensorBoard's event files too. `profile` traces a few steps.
    `metrics_port` serves goodput to Prometheus, on this host; 0 is a port that the system chooses.
    """

    samples: bool = False
    tensorboard: bool = False
    profile: bool = False
    metrics_port: int | None = Field(default=None, ge=0, le=65535, strict=True)


class ElasticSection(Section):
    """How a job goes on when devices fail. A rank that does not get on for `hang_s` seconds is ended, and counts as
    dead; by default 20 times the time of a step, at least 5 s. `faults` happen on purpose, as in
    "kill:device=1,step=60".

    `memory` is what each device has for weights, gradients and optimizer state, in bytes or as in "24GB": one number
    for all or one for each; plans that need more are refused. With `survive` it is to be enough after so many deaths.

    Every `compare_every` steps (0: never) devices that hold the same parameters compare checksums of them, and all the
    gradient norm; with `expel` one that differs from the majority counts as dead.
    """

    hang_s: float | None = Field(default=None, ge=0.5, le=604800)
    faults: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    memory: Annotated[tuple[ByteCount, ...], BeforeValidator(_as_list)] | None = Field(default=None, min_length=1)
    survive: int = Field(default=0, ge=0, le=4, strict=True)
    compare_every: int = Field(default=100, ge=0, strict=True)
    expel: bool = True


class LaunchSection(Section):
    """`threads` of the CPU for each rank (default: an equal part of the cores); bound on a collective in seconds.

    `backend` carries collectives; "auto" is gloo on the CPU and NCCL on CUDA.
    """

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    threads: int | None = Field(default=None, ge=1, le=1024, strict=True)
    timeout_s: float = Field(default=600.0, ge=1, le=604800)


class TrainConfig(Section):
    """A training job.

    `model` is a Hugging Face folder or a GGUF file, whose weights are loaded, "smollm2" for those of that package, or a
    `config.json` for random ones; None is the built-in configuration. `tokenizer` is a folder, a `tokenizer.json`, or
    "byte"; None is the model folder's own if it has one, otherwise "byte".
    """

    model: Path | None = None
    tokenizer: str | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = Field(default=0, ge=0, lt=2**63, strict=True)
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    parallel: ParallelSection = ParallelSection()
    eval: EvalSection = EvalSection()
    sample: SampleSection = SampleSection()
    log: LogSection = LogSection()
    elastic: ElasticSection = ElasticSection()
    launch: LaunchSection = LaunchSection()

    def with_learning_rate(self, *, has_weights: bool) -> "TrainConfig":
        """With `train.lr` and `train.min_lr` as numbers: of a small new model, or gentle ones for given weights."""
        lr = self.train.lr or (LR_OF_GIVEN_WEIGHTS if has_weights else LR_OF_RANDOM_WEIGHTS)
        min_lr = lr / 20 if self.train.min_lr is None else self.train.min_lr
        return self.model_copy(update={"train": self.train.model_copy(update={"lr": lr, "min_lr": min_lr})})
