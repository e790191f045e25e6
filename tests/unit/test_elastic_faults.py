"""Faults as they are written on the command line."""

from typing import get_args

import pytest

from uneven.elastic.faults import Fault, Phase, Point, parse_fault
from uneven.errors import ConfigError

GOOD = {
    "kill:device=2,step=60": Fault("kill", 2, Point("forward", 60)),
    "hang:device=0,step=3,phase=backward": Fault("hang", 0, Point("backward", 3)),
    "kill:phase=recovery,device=11": Fault("kill", 11, Point("recovery")),
    "hang:device=1,phase=start-up": Fault("hang", 1, Point("start-up")),
    "drain:device=1,step=4": Fault("drain", 1, Point("forward", 4)),
    "return:step=0,device=1": Fault("return", 1, Point("forward", 0)),
}


@pytest.mark.parametrize("text", GOOD)
def test_a_fault_is_read(text: str) -> None:
    assert parse_fault(text) == GOOD[text]


@pytest.mark.parametrize("phase", get_args(Phase))
@pytest.mark.parametrize("step", [None, 7])
def test_a_fault_is_written_as_it_is_read(phase: Phase, step: int | None) -> None:
    fault = Fault("kill", 3, Point(phase, step))
    assert parse_fault(str(fault)) == fault


FORM = r"expected device=N,step=N and perhaps phase=NAME, each once, found "
BAD = {
    "": r"expected one of kill, hang, drain, return before the colon, found ''",
    "stop:device=1,step=2": r"expected one of kill, .* found 'stop'",
    "device=1,step=2": r"expected one of kill, .* found 'device=1,step=2'",
    "kill": FORM + "''",
    "kill:": FORM + "''",
    "kill:device=1,step=2,": FORM + "''",
    "kill:device=1,step=": FORM + "'step='",
    "kill:device=1,step": FORM + "'step'",
    "kill:device=1,rank=2": FORM + "'rank=2'",
    "kill:device=1,step=2,device=3": FORM + "'device=3'",
    "kill:device=1, step=2": FORM + "' step=2'",
    "kill:device=-1,step=2": "device is a whole number, found '-1'",
    "kill:device=x,step=2": "device is a whole number, found 'x'",
    "kill:device=1,step=2.5": r"step is a whole number, found '2\.5'",
    "kill:device=١,step=2": "device is a whole number, found '١'",
    "kill:step=2": "a device, and a step or a phase, are needed",
    "kill:device=1": "a device, and a step or a phase, are needed",
    "kill:device=1,step=2,phase=lunch": r"expected one of the phases start-up, forward, .*, join, found 'lunch'",
    "drain:device=1,phase=commit": "a drain happens between steps: it takes a step and no phase",
    "drain:device=1,step=2,phase=forward": "a drain happens between steps: it takes a step and no phase",
    "return:device=1,phase=join": "a return happens between steps: it takes a step and no phase",
}


@pytest.mark.parametrize("text", BAD)
def test_a_fault_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^--fault {text}: {BAD[text]}$"):
        parse_fault(text)
