"""A training job as a value: everything that is decided before a process starts, checked in full. Loads no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.config import TrainConfig
from uneven.data import (
    Corpus,
    Fields,
    Packing,
    TokenDataset,
    Tokenizer,
    load_tokenizer,
    prepare_dataset,
    read_corpus,
)
from uneven.errors import ConfigError, DataError, PlanError
from uneven.layout import ModelStructure, ParallelPlan, read_plan
from uneven.modelspec import ExpertDivision, ModelSpec, assemble, experts_of, find_weights, read_model, read_stored
from uneven.train.memory import Memory
from uneven.train.origin import Announce, find_model
from uneven.train.tensorboard import check_tensorboard

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True, slots=True)
class Design:
    """The part of a job that needs no data. `weights` is the folder that training starts from, None for random ones.

    `config` has its learning rates as numbers.
    """

    config: TrainConfig
    spec: ModelSpec
    weights: Path | None
    plan: ParallelPlan
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank of a training job is told. `heldout` is None where the end of the corpus is held out."""

    design: Design
    dataset: TokenDataset
    corpus: Corpus
    heldout: Corpus | None

    @property
    def config(self) -> TrainConfig:
        return self.design.config

    @property
    def plan(self) -> ParallelPlan:
        return self.design.plan

    @property
    def weights(self) -> dict[int, float] | None:
        """The speeds of the devices, where shares give them."""
        return device_weights(self.config, self.plan)

    def batch_numbers(self, step: int) -> range:
        """The global sample numbers of step 1, 2, ..."""
        batch = self.config.train.global_batch
        return range((step - 1) * batch, step * batch)

    def sample_numbers(self, step: int, *, plan: ParallelPlan, replica: int) -> range:
        """Those of them that a replica of the current plan uses; those of all replicas are consecutive."""
        mine = plan.batch_range(replica, global_batch=self.config.train.global_batch)
        return self.batch_numbers(step)[mine.start : mine.stop]


def device_weights(config: TrainConfig, plan: ParallelPlan) -> dict[int, float] | None:
    """The speeds of a plan's devices, where shares give them."""
    shares = config.parallel.shares
    if shares is None:
        return None
    return dict(zip(plan.devices, (share for each in shares for share in each), strict=True))


def design_job(config: TrainConfig, *, announce: Announce = print) -> Design:
    """Read the model and tokenizer, make or read the plan, and check that they fit. Raises InputErrors.

    Weights are checked by their headers. `announce` is told what takes long.
    """
    if config.log.tensorboard:
        check_tensorboard()
    model = find_model(config.model, cache=_home(config.data.cache), announce=announce)
    spec = read_model(model, experts=_expert_division(config), by_plan=_describe)
    if config.parallel.experts is not None and not experts_of(spec.structure):
        raise ConfigError(f"parallel.experts is {config.parallel.experts!r}, but a {spec.family} model has no experts")
    seq_len = config.train.seq_len
    if spec.max_positions is not None and seq_len > spec.max_positions:
        raise ConfigError(
            f"train.seq_len is {seq_len}, the model allows at most {spec.max_positions} (max_position_embeddings)"
        )
    tokenizer = load_tokenizer(config.tokenizer or _own_tokenizer(model))
    if tokenizer.vocab_size > spec.vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer.source!r} has {tokenizer.vocab_size} tokens, the model's vocabulary only "
            f"{spec.vocab_size} (vocab_size); use a model with at least {tokenizer.vocab_size}"
        )
    _check_prompt(tokenizer, config.sample.prompt)
    weights = find_weights(model)
    if weights is not None:
        assemble(spec.structure, read_stored(weights))
    config = config.with_learning_rate(has_weights=weights is not None)
    plan = make_plan(config, spec)
    Memory(config, plan).check(plan, survive=config.elastic.survive, weights=device_weights(config, plan))
    return Design(config, spec, weights, plan, tokenizer)


def _expert_division(config: TrainConfig) -> ExpertDivision | None:
    """How experts are divided: as the configuration says, or as the plan file does."""
    if config.parallel.plan is None or config.parallel.experts is not None:
        return config.parallel.experts
    return next(iter(experts_of(read_plan(config.parallel.plan).structure).values()), None)


def _describe(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ModelStructure]:
    """The structure of a family that only transformers knows: this loads torch, and most jobs do without."""
    from uneven.parallel import describe_config

    return describe_config(config)


def _check_prompt(tokenizer: Tokenizer, prompt: str) -> None:
    """The prompt is used after training, too late to find it wrong."""
    try:
        tokenizer.encode(prompt)
    except DataError as error:
        raise ConfigError(f"sample.prompt: {error}") from None


def _own_tokenizer(model: Path) -> str:
    """The tokenizer in a model's folder, or the bytes where it has none."""
    return str(model) if (model / "tokenizer.json").is_file() else "byte"


def prepare_job(design: Design, *, progress: Progress | None = None) -> Job:
    """Read and tokenise the corpus. Raises DataError."""
    config, data = design.config, design.config.data
    fields = Fields(data.text_field, data.messages_field)
    corpus = read_corpus(data.paths, fields=fields)
    heldout = read_corpus(data.heldout_paths, fields=fields) if data.heldout_paths else None
    dataset = prepare_dataset(
        corpus,
        design.tokenizer,
        heldout=heldout,
        packing=Packing(config.train.seq_len, data.holdout, data.restart_at_documents),
        cache=_home(data.cache),
        progress=progress,
    )
    if dataset.num_train < config.train.global_batch:
        raise DataError(
            f"the corpus gives {dataset.num_train} training sequences of {config.train.seq_len} tokens, a step needs "
            f"train.global_batch = {config.train.global_batch} of them"
        )
    return Job(design, dataset, corpus, heldout)


def _home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"data.cache {path}: {error}") from None


def make_plan(config: TrainConfig, spec: ModelSpec) -> ParallelPlan:
    """The plan of a configuration: from its file, its shares, or even shares of its degrees."""
    parallel = config.parallel
    if parallel.plan is not None:
        given = [key for key in ("replicas", "shares", "batch_shares") if getattr(parallel, key) is not None]
        if given:
            raise ConfigError(f"parallel.plan says all about the division; leave out parallel.{given[0]}")
        plan = read_plan(parallel.plan)
        _check_model(plan, spec, where=parallel.plan)
    else:
        degrees = parallel.replicas or (tuple(map(len, parallel.shares)) if parallel.shares else (2, 1))
        shares = parallel.shares or tuple((1.0,) * degree for degree in degrees)
        if tuple(map(len, shares)) != tuple(degrees):
            raise ConfigError(
                f"shares for replicas of {list(map(len, shares))} devices, but parallel.replicas is {list(degrees)}"
            )
        plan = ParallelPlan.from_shares(spec.structure, shares, batch_shares=parallel.batch_shares)
    for index, samples in enumerate(plan.samples(config.train.global_batch)):
        if samples == 0:
            total = sum(replica.batch_share for replica in plan.replicas)
            raise PlanError(
                f"replica {index} would get no sequence of the global batch: its batch share is "
                f"{plan.replicas[index].batch_share} of {total}, train.global_batch is {config.train.global_batch}"
            )
    return plan


def _check_model(plan: ParallelPlan, spec: ModelSpec, *, where: Path) -> None:
    planned, needed = plan.structure, spec.structure
    if planned == needed:
        return
    if planned.family != needed.family:
        raise PlanError(f"{where}: made for a {planned.family} model, this job trains a {needed.family} model")
    found = {parameter.name: parameter.shape for parameter in planned.parameters}
    wanted = {parameter.name: parameter.shape for parameter in needed.parameters}
    for name in [*wanted, *found]:
        if found.get(name) != wanted.get(name):
            raise PlanError(
                f"{where}: made for another model: {name} is {found.get(name, 'missing')} in the plan, "
                f"{wanted.get(name, 'missing')} in this model"
            )
    raise PlanError(f"{where}: made for another model: the shapes agree, but heads or units are grouped otherwise")
