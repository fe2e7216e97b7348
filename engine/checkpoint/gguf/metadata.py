"""The metadata of a GGUF file, read by kind."""

from typing import Any

from engine.checkpoint.gguf.header import GgufFile
from engine.core.errors import ModelError, UnsupportedModelError

__all__ = ["Metadata", "shown"]

_WITHOUT_EFFECT = {
    *("vocab_size", "rope.scaling.finetuned", "pooling_type", "expert_count", "expert_feed_forward_length"),
    "expert_shared_feed_forward_length",
}
"""Metadata that the tensors' shapes say, too, or that does not concern answers."""


class Metadata:
    """The metadata of one architecture, read by kind. What was never asked for is known in the end."""

    def __init__(self, file: GgufFile, name: str) -> None:
        self.file, self._name = file, name
        self._asked: set[str] = set()

    def _get(self, key: str, default: Any) -> Any:
        self._asked.add(key)
        return self.file.metadata.get(f"{self._name}.{key}", default)

    def check_all_known(self) -> None:
        """Raises UnsupportedModelError if there is metadata that no setting was made of."""
        prefix = f"{self._name}."
        keys = {key.removeprefix(prefix) for key in self.file.metadata if key.startswith(prefix)}
        if unknown := sorted(keys - self._asked - _WITHOUT_EFFECT):
            raise UnsupportedModelError(
                f"{self.file.path}: it is not known what {prefix}{unknown[0][:64]} = "
                f"{shown(self._get(unknown[0], None))} changes in the model's answers, so it cannot be served."
            )

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number. Raises ModelError if it is another thing, or missing and without a default."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not -1e15 < value < 1e15:
            raise ModelError(f"{self.file.path}: {self._name}.{key} is {shown(value)}, which is no usable number.")
        return float(value) if isinstance(value, float) else value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise ModelError(f"{self.file.path}: {self._name}.{key} is {shown(value)}, which is no size.")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.file.path}: {self._name}.{key} is {shown(value)}, which is no text.")
        return value

    def sizes(self, tensor: str, dimensions: int = 2) -> tuple[int, ...]:
        """Returns the shape of a tensor. Raises ModelError if there is none of that name and of so many dimensions."""
        found = self.file.tensors.get(tensor)
        if found is None or len(found.shape) != dimensions:
            raise ModelError(f"{self.file.path} is incomplete: it has no {dimensions}-dimensional tensor {tensor}.")
        return found.shape

    @property
    def head_size(self) -> int:
        default = self.size("embedding_length") // self.size("attention.head_count")
        size = self.size("attention.key_length", max(1, default))
        if self.size("attention.value_length", size) != size:
            raise UnsupportedModelError(
                f"{self.file.path}: heads whose keys and values differ in size cannot be served."
            )
        return size


def shown(value: object) -> str:
    """Returns a value of any kind for a message."""
    return "missing" if value is None else repr(value)[:64]
