"""Keep float64 where transformers rounds to float32 inside of norms, softmax and rotary embeddings.

Training in fp64 is for checking exactness; a rounding to fp32 on the way would hide errors below 1e-7.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """Within it a float64 tensor is never converted to float32 on its own device, and sums that start from
    `torch.zeros` in float32 start in float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.zeros and options.get("dtype") is torch.float32:
            options["dtype"] = torch.float64
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if options.get("dtype") is torch.float32:
                options["dtype"] = torch.float64
            args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
        return func(*args, **options)
