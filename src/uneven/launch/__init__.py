"""Start and watch the processes of a job, one for each device."""

from uneven.launch.launcher import Launcher, LaunchSettings
from uneven.launch.rank import Failure, Mailbox, Message, Program
from uneven.launch.run import launch
from uneven.launch.zygote import warm_up

__all__ = ["Failure", "LaunchSettings", "Launcher", "Mailbox", "Message", "Program", "launch", "warm_up"]
