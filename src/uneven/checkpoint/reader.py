"""Bytes of files by `pread` and by nothing else, so those counted are those asked of the system."""

import os
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import final

import torch

DTYPES = MappingProxyType({"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})


@final
class FileReader:
    """Reads runs of bytes, and counts them. Files stay open until the end."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._descriptors: dict[Path, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "FileReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Memory that is used again by the next call: new memory costs as much time as reading into it."""
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes]

    def read_into(self, target: memoryview, file: Path, *, offset: int) -> None:
        """Fill `target` from byte `offset` on; the system may give less than asked, at most 2 GiB at a time."""
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY)
            self._stack.callback(os.close, self._descriptors[file])
        done = 0
        while done < len(target):
            count = os.preadv(self._descriptors[file], [target[done:]], offset + done)
            if count == 0:
                raise OSError(0, "it became shorter while it was read")
            done += count
        self.num_bytes += done
