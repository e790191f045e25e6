"""The training loop: a job as a value, the program of each rank, and the launcher's side.

Nothing is imported here, so that a job can be designed and checked (`train.job`) without loading torch.
"""
