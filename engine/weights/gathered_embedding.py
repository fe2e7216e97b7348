"""One rank's part of an embedding, whose rows are gathered from all ranks."""

from torch import Tensor, nn

from engine.weights.partition import starts_of
from engine.weights.rank_group import RankGroup

__all__ = ["GatheredEmbedding"]


class GatheredEmbedding(nn.Embedding):
    """Replaces an nn.Embedding that only looks rows up: this rank has some columns of each row."""

    def __init__(self, weight: Tensor, group: RankGroup) -> None:  # [vocab_size, H]
        starts = starts_of(weight.shape[1], group.size)
        own = weight[:, starts[group.rank] : starts[group.rank + 1]].contiguous()
        super().__init__(own.shape[0], own.shape[1], _weight=own, _freeze=True)
        self.gather = group.gather(starts)

    def forward(self, input: Tensor) -> Tensor:  # [...] -> [..., H]
        rows: Tensor = super().forward(input)
        gathered = self.gather.run(rows.reshape(-1, rows.shape[-1]))
        return gathered.view(*input.shape, -1)
