"""The linear layer after which the ranks' partial sums are added (see `parallel`)."""

from __future__ import annotations

from torch import Tensor, nn

from baton.models.layers.linear import Build, Linear
from baton.models.layers.parallel import Share


class RowLinear(Linear):
    """y = x W^T + b, cut by its inputs: x [T, this rank's inputs] -> [T, out], the same on all ranks.

    `share`: this rank's part of the inputs; the weight is [out, share.length]. Several slices are separate products.
    """

    def __init__(self, share: Share, out_features: int, build: Build, bias: bool = False) -> None:
        super().__init__(share.length, out_features, build, bias)
        self.cuts = {"weight": (1, share)}
        self._build = build
        self._num_slices = build.ranks.slices(share.total)
        self._is_whole = build.ranks.num_slices == 1
        self._slices: list[Linear] = []

    def pack(self) -> None:
        if self._num_slices == 1:
            super().pack()
        elif self.weight is not None:
            for part in self.weight.detach().chunk(self._num_slices, dim=1):
                one = Linear(part.shape[1], self.out_features, self._build)
                one.weight = nn.Parameter(part.contiguous(), requires_grad=False)
                one.pack()
                self._slices.append(one)
            self.weight = None

    def in_place(self) -> tuple[int, int, int] | None:
        return super().in_place() if self._is_whole else None

    def partials(self, x: Tensor) -> list[Tensor]:
        """The partial sums [T, out] of this rank's slices, without the bias."""
        if self._num_slices == 1:
            return [super().forward(x, adds_bias=False)]
        parts = x.chunk(self._num_slices, dim=1)
        return [one(part.contiguous()) for part, one in zip(parts, self._slices, strict=True)]

    def forward(self, x: Tensor, adds_bias: bool = True) -> Tensor:
        if self._is_whole:
            return super().forward(x, adds_bias)
        out = self._build.ranks.add(self.partials(x))
        return out if self.bias is None or not adds_bias else out + self.bias
