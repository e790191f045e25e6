"""Start and watch the processes of a job, one for each device.

Nothing is imported here, so that the zygote can be warmed up (`launch.zygote`) before torch is loaded.
"""

RANK_THREAD = "uneven-rank"
"""The thread of a rank that is no process of its own (`launch.inline`)."""
