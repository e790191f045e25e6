"""What each rank of a training job runs: enter a quorum, step until done, evaluate, save.

A step is begin, forward and backward with sync, commit, apply. The commit is one sum over all ranks of everything
they must agree on: the gradient norm, the loss, and whether someone asked to stop. All that a rank knows of the
course of the job follows from the last commit, so one that joins knows as much as the others.
"""

import math
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, final

import torch
from torch.profiler import record_function
from transformers import PreTrainedModel

from uneven.checkpoint.export import export_model
from uneven.checkpoint.load import load_model
from uneven.comm import World
from uneven.data import Rows
from uneven.elastic.compare import Comparison
from uneven.elastic.division import Recipe
from uneven.elastic.member import Care, Committed, Member
from uneven.launch.rank import Mailbox
from uneven.layout import ModelLayout, ParallelPlan
from uneven.optim import AdamW, Schedule
from uneven.parallel import KeepFloat64, RouterLoss, build_model, fill_random, recompute_activations
from uneven.sync import Gradients
from uneven.train.check import check_folder
from uneven.train.inputs import model_inputs
from uneven.train.job import Job, keep_generation_config
from uneven.train.profile import StepProfiler
from uneven.train.records import MODEL, PARTIAL, STOP, Check, Evaluation, Outcome, Started, StepRecord, trace_file

SAVED_S = 60.0
"""How long a rank waits for the disk to have its part of the last checkpoint."""
DTYPES = (("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64))


def train_rank(world: World, mailbox: Mailbox, *args: Any) -> None:
    """The program of one rank, for (job, run folder, whether it outlives its peers)."""
    job: Job = args[0]
    folder: Path = args[1]
    trainer = Trainer(job, world, mailbox=mailbox, is_elastic=args[2], run=folder)
    trace = trace_file(folder, world.device) if job.config.log.profile else None
    profiler = StepProfiler(trace, num_steps=job.config.train.steps, device=world.torch_device)
    try:
        trainer.run(profiler, folder)
    finally:
        profiler.close()


@final
class Trainer:
    """One rank's member, and the steps over it."""

    def __init__(
        self, job: Job, world: World, *, mailbox: Mailbox, is_elastic: bool = False, run: Path | None = None
    ) -> None:
        config = job.config.train
        self.job = job
        self.world = world
        self.mailbox = mailbox
        recipe = Recipe(
            build=lambda: build_model(job.design.spec, dtype=dict(DTYPES)[config.precision]),
            finish=self._finish_model,
            rule=AdamW(betas=config.betas, eps=config.eps, weight_decay=config.weight_decay),
            copies=config.optimizer_copies,
            bucket_bytes=config.bucket_bytes,
        )
        elastic = job.config.elastic
        comparison = Comparison(elastic.compare_every, elastic.expel) if elastic.compare_every else None
        self.member = Member(
            recipe,
            world=world,
            mailbox=mailbox,
            start=self._fill,
            is_elastic=is_elastic,
            care=Care(comparison, run if is_elastic and job.config.checkpoint.every else None),
        )
        self.schedule = Schedule(
            peak=config.lr,
            floor=min(config.min_lr, config.lr),
            warmup_steps=config.warmup_steps,
            total_steps=config.steps,
            decay=config.schedule,
        )
        self._reader = job.dataset.open()
        self._num_heldout_targets = self._reader.heldout.num_targets(range(self.num_heldout))
        self._greeted = -1
        self._evaluated: tuple[int, int] | None = None
        self._wants_stop = False
        self._began_s = time.perf_counter()

    # The model

    def _finish_model(self, model: PreTrainedModel) -> None:
        if self.job.config.train.recompute:
            recompute_activations(model)
        if self.job.config.train.compile:
            model.compile()

    def _fill(self, model: PreTrainedModel, layout: ModelLayout) -> None:
        """With the weights that the job begins with."""
        design = self.job.design
        if design.weights is None:
            fill_random(model, layout, spec=design.spec, device=self.world.device, seed=self.job.config.seed)
        else:
            self.mailbox.post(load_model(model, layout, folder=design.weights, device=self.world.device))

    @property
    def plan(self) -> ParallelPlan:
        return self.member.plan

    @property
    def _is_reporter(self) -> bool:
        return self.world.device == self.plan.devices[0]

    # The loop

    @property
    def _is_over(self) -> bool:
        """After the last step, a stop, or too many non-finite steps in a row; the same on every rank."""
        config, member = self.job.config.train, self.member
        return member.step >= config.steps or self._is_stopped or member.skipped_in_row >= config.max_nonfinite

    @property
    def _is_stopped(self) -> bool:
        """Whether any rank had heard, by the last commit, that it was to stop."""
        return self.member.step > 0 and self.member.last.values[1] > 0

    def run(self, profiler: StepProfiler, folder: Path) -> None:
        """Step until it is over, then evaluate and save; the first device checks what has been saved.

        The held-out loss is taken as often as the configuration says, too.
        """
        every, save_every = self.job.config.eval.every, self.job.config.checkpoint.every
        outcome: Outcome | None = None
        while outcome is None:
            with self.member.begin() as step:
                self._greet()
                done = step - 1
                if self._is_over:
                    outcome = self._conclude(folder)
                elif done and every and done % every == 0 and self._evaluated != (done, self.member.generation):
                    self._report(self.evaluate(done))
                    self._evaluated = (done, self.member.generation)
                else:
                    with profiler.step(step):
                        self.step(step)
                    if save_every and step % save_every == 0 and step < self.job.config.train.steps:
                        self.member.save()
        self._report(outcome)
        self.member.clock.switch("checkpoint", time.monotonic())
        self.world.pulse.is_busy = True
        if self._is_reporter:
            # Weights that overflowed can neither be compared nor write.
            can_check = math.isfinite(outcome.heldout_loss)
            device = self.world.torch_device
            self.mailbox.post(check_folder(self.job, folder / MODEL, device=device) if can_check else Check())
        self.member.account()

    def _greet(self) -> None:
        """In a new generation whoever reports now says again what its predecessor may have died with."""
        if self._greeted == self.member.generation:
            return
        self._greeted = self.member.generation
        if self.member.step:
            self._report(self._record(self.member.last, time_s=time.perf_counter() - self._began_s))
        else:
            self._report(Started())

    def _report(self, event: Started | StepRecord | Evaluation | Outcome | Check) -> None:
        if self._is_reporter:
            self.mailbox.post(event)

    def step(self, step: int) -> StepRecord:
        """One attempt at a transaction. Called by all ranks."""
        self._began_s = time.perf_counter()
        self._wants_stop = self._wants_stop or self.mailbox.poll() == STOP
        seed = self.job.config.seed
        with self.member.clock.of("data", time.monotonic):
            numbers = self.job.sample_numbers(step, plan=self.plan, replica=self.member.replica)
            rows, num_tokens = self._reader.batch(numbers, seed=seed), self._tokens(step)
        gradients, loss = self.forward_backward(rows, num_tokens=num_tokens)
        values = (loss * self.member.is_leader, loss.new_tensor(float(self._wants_stop)))
        with record_function("commit and apply"):
            committed = self.member.commit(
                gradients, values, lr=self.schedule.learning_rate(step), clip=self.job.config.train.clip
            )
        record = self._record(committed, time_s=time.perf_counter() - self._began_s)
        self._report(record)
        return record

    def _tokens(self, step: int) -> int:
        """Targets in the global batch of a step."""
        return self._reader.num_targets(self.job.batch_numbers(step), seed=self.job.config.seed)

    def _record(self, committed: Committed, *, time_s: float) -> StepRecord:
        numbers = tuple(self.job.batch_numbers(committed.step))
        return StepRecord(
            step=committed.step,
            loss=committed.values[0],
            grad_norm=committed.norm,
            lr=self.schedule.learning_rate(committed.step),
            tokens=self._tokens(committed.step),
            time_s=time_s,
            is_skipped=committed.is_skipped,
            samples=numbers if self.job.config.log.samples else None,
        )

    def forward_backward(self, rows: Rows, *, num_tokens: int) -> tuple[Gradients, torch.Tensor]:
        """Reduced gradients of the global batch, and this replica's part of its loss, float64.

        `num_tokens` are the targets of the global batch.
        """
        micro = self.job.config.train.micro_batch
        parts = [rows[first : first + micro] for first in range(0, len(rows), micro)]
        self._count_choices(parts)
        loss = torch.zeros((), dtype=torch.float64, device=self.world.torch_device)
        reducer = self.member.reducer
        reducer.begin(num_backwards=len(parts))
        for each in parts:
            with record_function("forward"):
                part = self.loss(each, num_tokens=num_tokens)
            with record_function("backward"):
                part.backward()
            loss += part.detach()
        with record_function("sync"):
            return reducer.finish(), loss

    def _count_choices(self, parts: list[Rows]) -> None:
        """For a mixture of experts with a balance loss, which needs the choices of the whole batch."""
        router: RouterLoss | None = self.member.model.loss_function.router
        if router is not None:
            everyone = self.world.everyone(purpose="router")
            router.count(
                lambda: [self.loss(part, num_tokens=1) for part in parts],
                group=everyone,
                is_counted=self.member.is_leader,
            )

    def loss(self, rows: Rows, *, num_tokens: int) -> torch.Tensor:
        """The loss of the targets in these rows, summed and divided by `num_tokens`."""
        inputs = model_inputs(rows, device=self.world.torch_device)
        with KeepFloat64() if self.job.config.train.precision == "fp64" else nullcontext():
            # Where nothing is a target the sum is 0, whatever it is divided by.
            loss: torch.Tensor = self.member.model(**inputs, num_items_in_batch=max(num_tokens, 1)).loss
        return loss

    # Evaluation and end

    @property
    def num_heldout(self) -> int:
        """How many held-out sequences are evaluated."""
        return min(self.job.config.eval.sequences, self.job.dataset.num_heldout)

    def evaluate(self, step: int) -> Evaluation:
        """The held-out loss after a step; called by all ranks."""
        began = time.perf_counter()
        with self.world.pulse.busy():
            return Evaluation(step, self.heldout_loss(), time.perf_counter() - began)

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Mean loss in nats per token over the first held-out sequences, shared out among the replicas."""
        model = self.member.model
        model.eval()
        mine = range(self.member.replica, self.num_heldout, len(self.plan.replicas))
        total = torch.zeros((), dtype=torch.float64, device=self.world.torch_device)
        micro = self.job.config.train.micro_batch
        for first in range(0, len(mine), micro):
            rows = self._reader.heldout.rows(mine[first : first + micro])
            total += self.loss(rows, num_tokens=self._num_heldout_targets)
        model.train()
        return float(self.world.everyone(purpose="commit").all_reduce(total * self.member.is_leader))

    def _conclude(self, folder: Path) -> Outcome:
        """Evaluate and save. Till all have come so far, each may be needed again."""
        member = self.member
        evaluation = self.evaluate(member.step)
        if self.job.config.eval.every:
            self._report(evaluation)
        with member.clock.of("checkpoint", time.monotonic), self.world.pulse.busy():
            self._save(folder)
        self.member.finish_saving(SAVED_S)
        self.member.save()
        self.member.finish_saving(SAVED_S)
        self.world.everyone(purpose="commit").all_reduce(torch.zeros(1, device=self.world.torch_device))
        return Outcome(
            member.step,
            evaluation.heldout_loss,
            self.num_heldout,
            num_skipped=member.step - member.num_updates,
            is_stopped=self._is_stopped,
            nonfinite_in_row=member.skipped_in_row,
        )

    def _save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder; the first replica's devices take part, its first one writes."""
        if self.member.replica != 0:
            return
        partial, model = folder / PARTIAL, folder / MODEL
        if self._is_reporter:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        division, design = self.member.division, self.job.design
        export_model(division.model, division.layout, spec=design.spec, world=self.world, folder=partial)
        if self._is_reporter:
            design.tokenizer.save(partial)
            keep_generation_config(self.job, partial)
            shutil.rmtree(model, ignore_errors=True)  # of an attempt whose end was not seen by all
            partial.rename(model)
