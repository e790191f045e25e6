"""A bundle as one axis of elements, which is this rank's parameters, or flat gradients, laid end to end."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import final

import torch

from uneven.layout import Interval, ModelLayout, ParameterSpec, Segment, slabs_of


@final
class EndToEnd:
    """Tensors, none of them empty, as one axis of elements."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.starts = list(accumulate((tensor.numel() for tensor in tensors), initial=0))

    def cut(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """The elements from `start` to `stop`, flat, tensor by tensor: views, but copies of what isn't contiguous."""
        index = bisect_right(self.starts, start) - 1
        while start < stop:
            first = self.starts[index]
            yield self.tensors[index].reshape(-1)[start - first : stop - first]
            index += 1
            start = self.starts[index]


@final
class LocalBundle:
    """A bundle in this rank's parameters."""

    def __init__(
        self,
        entries: Sequence[tuple[ParameterSpec, Segment]],
        parameters: Mapping[str, torch.Tensor],
        *,
        layout: ModelLayout,
        device: int,
    ) -> None:
        slabs = [
            (parameters[spec.name], slab)
            for spec, segment in entries
            for slab in slabs_of(spec, segment, layout=layout, device=device)
        ]
        self.device = slabs[0][0].device
        self._views = EndToEnd([whole.narrow(slab.dim, slab.start, slab.shape[slab.dim]) for whole, slab in slabs])

    def read(self, start: int, stop: int, *, dtype: torch.dtype) -> torch.Tensor:
        """A flat copy of the elements from `start` to `stop`."""
        values = torch.empty(stop - start, dtype=dtype, device=self.device)
        filled = 0
        for part in self._views.cut(start, stop):
            values[filled : filled + part.numel()] = part
            filled += part.numel()
        return values

    def write(self, values: EndToEnd) -> None:
        """Set all elements; `values` has each slab of a parameter in one tensor."""
        for view, start in zip(self._views.tensors, self._views.starts[:-1], strict=True):
            (flat,) = values.cut(start, start + view.numel())
            view.copy_(flat.view(view.shape))

    def runs(self, start: int, stop: int) -> Iterator[tuple[Interval, bool]]:
        """The elements from `start` to `stop` in runs that decay, those of matrices, and runs that don't."""
        first = 0
        for decays, views in groupby(self._views.tensors, key=lambda view: view.ndim >= 2):
            last = first + sum(view.numel() for view in views)
            if first < stop and last > start:
                yield (max(first, start), min(last, stop)), decays
            first = last
