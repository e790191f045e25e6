"""Start and watch the processes of a job, one for each device.

Nothing is imported here, so that the zygote can be warmed up (`launch.zygote`) before torch is loaded.
"""
