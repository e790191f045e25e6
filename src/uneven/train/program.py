"""What each rank of a training job runs: build, step until done, evaluate, save.

A step is begin, forward and backward with sync, commit, apply. The commit is one sum over all ranks of everything
they must agree on: the gradient norm, the loss, and whether someone asked to stop.
"""

import math
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch.profiler import record_function
from transformers import PreTrainedModel

from uneven.checkpoint import export_model, load_model
from uneven.comm import World
from uneven.data import Rows
from uneven.launch.rank import Mailbox
from uneven.optim import AdamW, Schedule, ShardedOptimizer
from uneven.parallel import KeepFloat64, RouterLoss, build_model, fill_random, parallelize, recompute_activations
from uneven.sync import Gradients, GradReducer
from uneven.train.check import check_folder
from uneven.train.inputs import model_inputs
from uneven.train.job import Job
from uneven.train.profile import StepProfiler
from uneven.train.records import MODEL, PARTIAL, STOP, Check, Evaluation, Outcome, Started, StepRecord, trace_file

DTYPES = (("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64))


def train_rank(world: World, mailbox: Mailbox, *args: Any) -> None:
    """The program of one rank, for (job, run folder); the first device posts records and writes the model."""
    job: Job = args[0]
    folder: Path = args[1]
    trainer = Trainer(job, world)
    is_reporter = world.device == job.plan.devices[0]
    if trainer.bytes_read is not None:
        mailbox.post(trainer.bytes_read)
    if is_reporter:
        mailbox.post(Started())
    trace = trace_file(folder, world.device) if job.config.log.profile else None
    profiler = StepProfiler(trace, num_steps=job.config.train.steps, device=world.torch_device)
    outcome = trainer.run(mailbox, profiler=profiler, is_reporter=is_reporter)
    evaluation = trainer.evaluate(outcome.last_step)
    outcome = replace(outcome, heldout_loss=evaluation.heldout_loss)
    if is_reporter and job.config.eval.every:
        mailbox.post(evaluation)
    trainer.save(folder / PARTIAL)
    if is_reporter:
        job.design.tokenizer.save(folder / PARTIAL)
        _keep_generation_config(job, folder / PARTIAL)
        (folder / PARTIAL).rename(folder / MODEL)
        mailbox.post(outcome)
        # Weights that overflowed can neither be compared nor write.
        can_check = math.isfinite(outcome.heldout_loss)
        mailbox.post(check_folder(job, folder / MODEL, device=world.torch_device) if can_check else Check())


def _keep_generation_config(job: Job, folder: Path) -> None:
    """How the model that training started from is to generate: where its answers end, for one."""
    source = None if job.design.weights is None else job.design.weights / "generation_config.json"
    if source is not None and source.is_file():
        (folder / source.name).write_bytes(source.read_bytes())


@final
class Trainer:
    """One rank's model, reducer and optimizer, and the steps over them."""

    def __init__(self, job: Job, world: World) -> None:
        config = job.config.train
        self.job = job
        self.world = world
        self.replica = job.plan.replica_of(world.device)
        self.layout = job.plan.layout_of(world.device)
        model = build_model(job.design.spec, dtype=dict(DTYPES)[config.precision])
        self.model: PreTrainedModel = parallelize(model, self.layout, world=world)
        if job.design.weights is None:
            fill_random(self.model, self.layout, spec=job.design.spec, device=world.device, seed=job.config.seed)
            self.bytes_read = None
        else:
            self.bytes_read = load_model(self.model, self.layout, folder=job.design.weights, device=world.device)
        if config.recompute:
            recompute_activations(self.model)
        if config.compile:
            self.model.compile()
        self.reducer = GradReducer(self.model, job.plan, world=world, bucket_bytes=config.bucket_bytes)
        rule = AdamW(betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)
        self.optimizer = ShardedOptimizer(self.model, job.plan, world=world, rule=rule, copies=config.optimizer_copies)
        self.schedule = Schedule(
            peak=config.lr,
            floor=min(config.min_lr, config.lr),
            warmup_steps=config.warmup_steps,
            total_steps=config.steps,
            decay=config.schedule,
        )
        self._reader = job.dataset.open()
        self._num_heldout_targets = self._reader.heldout.num_targets(range(self.num_heldout))
        self._is_leader = world.device == self.layout.devices[0]

    def run(self, mailbox: Mailbox, *, profiler: StepProfiler, is_reporter: bool) -> Outcome:
        """Step until the last step, a stop, or too many non-finite steps in a row; the same on every rank.

        The held-out loss is taken as often as the configuration says, but not at the end.
        """
        config, every = self.job.config.train, self.job.config.eval.every
        step = num_skipped = num_tokens = in_row = 0
        is_stopped = False
        while step < config.steps and not is_stopped and in_row < config.max_nonfinite:
            if step and every and step % every == 0:  # equal on all ranks, as is what ends the loop
                evaluation = self.evaluate(step)
                if is_reporter:
                    mailbox.post(evaluation)
            step += 1
            with profiler.step(step):
                record, is_stopped = self.step(step, wants_stop=mailbox.poll() == STOP)
            in_row = in_row + 1 if record.is_skipped else 0
            num_skipped += record.is_skipped
            num_tokens += 0 if record.is_skipped else record.tokens
            if is_reporter:
                mailbox.post(record)
        profiler.close()
        return Outcome(step, num_skipped, num_tokens, float("nan"), self.num_heldout, is_stopped, in_row)

    def step(self, step: int, *, wants_stop: bool) -> tuple[StepRecord, bool]:
        """One transaction; returns its record and whether any rank wants to stop after it. Called by all ranks."""
        began = time.perf_counter()
        seed = self.job.config.seed
        rows = self._reader.batch(self.job.sample_numbers(step, replica=self.replica), seed=seed)
        num_tokens = self._reader.num_targets(self.job.batch_numbers(step), seed=seed)
        gradients, loss = self.forward_backward(rows, num_tokens=num_tokens)
        norm, total_loss, is_stopped = self.commit(gradients, loss, wants_stop=wants_stop)
        lr = self.schedule.learning_rate(step)
        is_skipped = not math.isfinite(norm)
        if not is_skipped:
            self.apply(gradients, norm=norm, lr=lr)
        record = StepRecord(
            step=step,
            loss=total_loss,
            grad_norm=norm,
            lr=lr,
            tokens=num_tokens,
            time_s=time.perf_counter() - began,
            is_skipped=is_skipped,
            samples=self._samples(step),
        )
        return record, is_stopped

    def forward_backward(self, rows: Rows, *, num_tokens: int) -> tuple[Gradients, torch.Tensor]:
        """Reduced gradients of the global batch, and this replica's part of its loss, float64.

        `num_tokens` are the targets of the global batch.
        """
        micro = self.job.config.train.micro_batch
        parts = [rows[first : first + micro] for first in range(0, len(rows), micro)]
        self._count_choices(parts)
        loss = torch.zeros((), dtype=torch.float64, device=self.world.torch_device)
        self.reducer.begin(num_backwards=len(parts))
        for each in parts:
            with record_function("forward"):
                part = self.loss(each, num_tokens=num_tokens)
            with record_function("backward"):
                part.backward()
            loss += part.detach()
        with record_function("sync"):
            return self.reducer.finish(), loss

    def _count_choices(self, parts: list[Rows]) -> None:
        """For a mixture of experts with a balance loss, which needs the choices of the whole batch."""
        router: RouterLoss | None = self.model.loss_function.router
        if router is not None:
            everyone = self.world.everyone(purpose="router")
            router.count(
                lambda: [self.loss(part, num_tokens=1) for part in parts], group=everyone, is_counted=self._is_leader
            )

    def commit(self, gradients: Gradients, loss: torch.Tensor, *, wants_stop: bool) -> tuple[float, float, bool]:
        """Gradient norm and loss of the global batch, and whether to stop: who has them knows that all have come."""
        mine = torch.stack([gradients.squared_norm(), loss * self._is_leader, loss.new_tensor(float(wants_stop))])
        with record_function("commit"):
            squared_norm, total_loss, stops = self.world.everyone(purpose="commit").all_reduce(mine).tolist()
        return squared_norm**0.5, total_loss, stops > 0

    def apply(self, gradients: Gradients, *, norm: float, lr: float) -> None:
        """Clip, update without communication, and gather the updated parameters."""
        with record_function("optimizer"):
            gradients.clip(self.job.config.train.clip, norm=norm)
            self.optimizer.step(gradients.tiles, lr=lr)

    def loss(self, rows: Rows, *, num_tokens: int) -> torch.Tensor:
        """The loss of the targets in these rows, summed and divided by `num_tokens`."""
        inputs = model_inputs(rows, device=self.world.torch_device)
        with KeepFloat64() if self.job.config.train.precision == "fp64" else nullcontext():
            # Where nothing is a target the sum is 0, whatever it is divided by.
            loss: torch.Tensor = self.model(**inputs, num_items_in_batch=max(num_tokens, 1)).loss
        return loss

    @property
    def num_heldout(self) -> int:
        """How many held-out sequences are evaluated."""
        return min(self.job.config.eval.sequences, self.job.dataset.num_heldout)

    def evaluate(self, step: int) -> Evaluation:
        """The held-out loss after a step; called by all ranks."""
        began = time.perf_counter()
        return Evaluation(step, self.heldout_loss(), time.perf_counter() - began)

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Mean loss in nats per token over the first held-out sequences, shared out among the replicas."""
        self.model.eval()
        mine = range(self.replica, self.num_heldout, len(self.job.plan.replicas))
        total = torch.zeros((), dtype=torch.float64, device=self.world.torch_device)
        micro = self.job.config.train.micro_batch
        for first in range(0, len(mine), micro):
            rows = self._reader.heldout.rows(mine[first : first + micro])
            total += self.loss(rows, num_tokens=self._num_heldout_targets)
        self.model.train()
        return float(self.world.everyone(purpose="commit").all_reduce(total * self._is_leader))

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder; the first replica's devices take part."""
        if self.replica == 0:
            export_model(self.model, self.layout, spec=self.job.design.spec, world=self.world, folder=folder)

    def _samples(self, step: int) -> tuple[int, ...] | None:
        if not self.job.config.log.samples:
            return None
        replicas = range(len(self.job.plan.replicas))
        return tuple(number for replica in replicas for number in self.job.sample_numbers(step, replica=replica))
