"""The launcher's book of all devices: who was there, what each told of its time, and who was lost.

Times are seconds of the job, counted from `Ledger.began_s` when this launcher started. A rank's own sums say what
its seconds were; that they add up to the time that the launcher saw is measured, not assumed.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Self, final

from uneven.errors import GoodputError
from uneven.goodput.book import Account, Book, Tokens, header_line, read_book, tokens_line
from uneven.goodput.kinds import Kind, Seconds, check_kinds, every_kind


@final
class _Incarnation:
    """One process of a device: there until `gone_s`, absent until `closed_s`."""

    def __init__(self, device: int, *, number: int, began_s: float) -> None:
        self.device = device
        self.number = number
        self.began_s = began_s
        self.heard_s: float | None = None
        self.gone_s: float | None = None
        self.closed_s: float | None = None
        self.seconds: dict[Kind, float] = every_kind({})
        self._boot_s = 0.0

    def hear(self, seconds: Seconds, at: float) -> None:
        """The first report tells how long the process took until its clock began: that is start-up too."""
        if self.heard_s is None:
            self._boot_s = max(0.0, at - self.began_s - sum(seconds.values()))
        self.seconds = every_kind(seconds)
        self.seconds["startup"] += self._boot_s
        self.heard_s = at

    def account(self, at: float) -> Account:
        """Up to `at` if it is gone, up to what it last told if it is there."""
        seconds = dict(self.seconds)
        until_s = self.closed_s if self.closed_s is not None else at
        if self.gone_s is not None:
            seconds["absent"] += until_s - self.gone_s
        elif self.heard_s is None:
            seconds["startup"] += until_s - self.began_s
        elif self.closed_s is None:
            until_s = self.heard_s
        return Account(self.device, self.number, self.began_s, until_s, seconds)


@final
class Ledger:
    """Book of the devices of a job. With `path` it is kept in a file; one that is there is gone on with."""

    def __init__(self, path: Path | None = None, *, num_parameters: int) -> None:
        is_resumed = path is not None and path.exists()
        before = read_book(path) if path is not None and is_resumed else Book(0.0, num_parameters, Tokens(), ())
        self.began_s = before.time_s
        self._num_parameters = num_parameters
        self._tokens = before.tokens
        self._before = before.accounts
        self._resumed_s = (*before.resumed_s, before.time_s) if is_resumed else ()
        self._incarnations: list[_Incarnation] = []
        self._newest: dict[int, _Incarnation] = {}
        self._numbers = {account.device: account.incarnation + 1 for account in self._before}
        self._written: dict[_Incarnation, Account] = {}
        self._time_s = self.began_s
        self._file = None if path is None else path.open("r+b" if is_resumed else "xb")
        if self._file is not None:
            whole = self._file.read().rfind(b"\n") + 1 if is_resumed else 0
            self._file.seek(whole)
            self._file.truncate()
            self._write([header_line(self.began_s, num_parameters)])

    def started(self, device: int, at: float) -> None:
        """A process for the device was started: its start-up begins, and its absence ends."""
        self._open(device, self._now(at))

    def reported(self, device: int, seconds: Seconds, *, at: float) -> None:
        """`DeviceClock.totals` of a process, as the launcher hears of it at `at`. Best at every commit, and at the end.

        What a process said before its end but is heard after that is left out: its time is accounted for already.
        """
        check_kinds(seconds, where=f"report of device {device}")
        incarnation = self._of(device)
        if incarnation.gone_s is None:
            incarnation.hear(seconds, self._now(at))

    def failed(self, device: int, *, last_alive_at: float, noticed_at: float) -> None:
        """It moved last at `last_alive_at`; what it did since its last report is lost. Then it is absent."""
        noticed_at = self._now(noticed_at)
        lost = self._present(device, noticed_at)
        told_s = lost.began_s if lost.heard_s is None else lost.heard_s
        stopped_s = min(max(last_alive_at, told_s), noticed_at)
        lost.seconds["startup" if lost.heard_s is None else "repeated"] += stopped_s - told_s
        lost.seconds["detection"] += noticed_at - stopped_s
        lost.gone_s = noticed_at

    def left(self, device: int, at: float) -> None:
        """It is out of the job, on purpose, from `at` on: drained, or never started here."""
        at = self._now(at)
        incarnation = self._present(device, at) if device in self._newest else self._open(device, at)
        if incarnation.heard_s is None:
            incarnation.seconds["startup"] += at - incarnation.began_s
        incarnation.gone_s = at

    def ended(self, at: float) -> None:
        """The job is over for all devices."""
        for incarnation in self._newest.values():
            incarnation.closed_s = self._now(at)

    def count(self, tokens: int, *, is_committed: bool) -> None:
        """Target tokens of a step whose work was kept, or was lost."""
        committed = tokens if is_committed else 0
        self._tokens = Tokens(self._tokens.committed + committed, self._tokens.computed + tokens)

    def book(self, at: float) -> Book:
        """What is known at `at`, each account once."""
        accounts = (*self._before, *(each.account(self._now(at)) for each in self._incarnations))
        return Book(self._time_s, self._num_parameters, self._tokens, accounts, self._resumed_s)

    def flush(self, at: float) -> None:
        """Bring the file up to date. Whoever is killed later leaves what was true now."""
        accounts = {each: each.account(self._now(at)) for each in self._incarnations}
        changed = [account for each, account in accounts.items() if self._written.get(each) != account]
        self._written = accounts
        self._write([*(account.to_json() for account in changed), tokens_line(self._time_s, self._tokens)])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _open(self, device: int, at: float) -> _Incarnation:
        before = self._newest.get(device)
        if before is not None:
            if before.gone_s is None:
                raise GoodputError(
                    f"device {device} can't be started at {at:g} s: it is there since {before.began_s:g} s"
                )
            before.closed_s = at
        number = self._numbers.get(device, 0)
        self._numbers[device] = number + 1
        self._newest[device] = _Incarnation(device, number=number, began_s=at)
        self._incarnations.append(self._newest[device])
        return self._newest[device]

    def _of(self, device: int) -> _Incarnation:
        if device not in self._newest:
            raise GoodputError(f"device {device} has not been started; known are {sorted(self._newest)}")
        return self._newest[device]

    def _present(self, device: int, at: float) -> _Incarnation:
        incarnation = self._of(device)
        if incarnation.gone_s is not None:
            raise GoodputError(f"device {device} can't go at {at:g} s: it is gone since {incarnation.gone_s:g} s")
        return incarnation

    def _now(self, at: float) -> float:
        # Threads notice things in another order than they happen; the book does not go back.
        self._time_s = max(self._time_s, at)
        return self._time_s

    def _write(self, lines: list[dict[str, object]]) -> None:
        if self._file is not None:
            self._file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            self._file.flush()
