"""A pool of rank processes, started once for the session by the product's own launcher, that runs test cases."""

import contextlib
from collections.abc import Callable
from typing import Any

from uneven.comm import Transport, World
from uneven.launch.launcher import Launcher, LaunchSettings
from uneven.launch.rank import Mailbox
from uneven.launch.zygote import warm_up

START_TIMEOUT_S = 120.0
CASE_TIMEOUT_S = 90.0
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "granite", "olmo2", "phi3", "phi", "gpt_neox"),
    *("cohere2", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"),
)
MODELS = tuple(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES)


def serve_cases(world: World, mailbox: Mailbox) -> None:
    """A rank of the pool: run each case it belongs to in a fresh world of the case's size."""
    mailbox.post("ready")
    while True:
        number, case, args, num_ranks = mailbox.wait()
        if world.device >= num_ranks:
            continue
        try:
            result = case(world.scoped(f"case-{number}", range(num_ranks)), *args)
        except Exception as error:
            raise RuntimeError(f"{case.__name__}: rank {world.device} of {num_ranks} failed") from error
        mailbox.post((number, result))


class RankPool:
    """`run` calls a module-level function on ranks 0 to n - 1; after a failure the pool starts anew."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._job: Launcher | None = None
        self._number = 0

    def run(self, case: Callable[..., Any], *args: Any, num_ranks: int) -> list[Any]:
        """The results of `case(world, *args)` by rank. Raises RankFailed with the traceback of the rank at fault."""
        assert num_ranks <= self.size
        job = self._job or self._start()
        self._number += 1
        for device in range(num_ranks):
            job.tell((self._number, case, args, num_ranks), device=device)
        results: dict[int, Any] = {}
        try:
            for message in job.messages(timeout_s=CASE_TIMEOUT_S):
                number, result = message.payload
                assert number == self._number
                results[message.device] = result
                if len(results) == num_ranks:
                    break
        except BaseException:
            self.close()
            raise
        return [results[device] for device in range(num_ranks)]

    def _start(self) -> Launcher:
        warm_up(*MODELS)
        settings = LaunchSettings(Transport(timeout_s=60.0), num_threads=1)
        job = Launcher(serve_cases, devices=range(self.size), settings=settings).__enter__()
        for ready, message in enumerate(job.messages(timeout_s=START_TIMEOUT_S), start=1):
            assert message.payload == "ready"
            if ready == self.size:
                break
        self._job = job
        return job

    def close(self) -> None:
        if self._job is not None:
            with contextlib.suppress(ProcessLookupError):
                self._job.stop()
            self._job = None
