"""A fused decoder layer, around whatever parts: its norms are one pass with the sums before them."""

from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from engine.model.fused_modules import FusedAttention, FusedMLP, FusedRMSNorm

__all__ = ["ExpertsBeside", "FusedDecoderLayer", "LayerForm", "LayerInput", "LayerNorms"]


class LayerNorms(NamedTuple):
    """The norms of a decoder layer, or their names: of what attention and MLP read, and of what they add."""

    attention: Any | None
    attended: Any | None
    mlp: Any | None
    added: Any | None


class LayerInput(NamedTuple):
    """What a layer does with an input of its own: names of its parts. The input is multiplied by a gelu of `gate`."""

    gate: str
    projection: str
    norm: str


class ExpertsBeside(NamedTuple):
    """Experts beside a layer's MLP, which read what that reads a norm of: names of their parts."""

    router: str
    """What gives scores, weights and experts of rows that are not normed."""
    experts: str
    norm: str
    """Norm of what experts read."""
    added: str
    """Norm of what they make."""
    of_mlp: str
    """Norm of what the MLP makes."""


class LayerForm(NamedTuple):
    """What a decoder layer consists of, beside its attention and its MLP."""

    names: LayerNorms
    """Names of its norms."""
    multiplier: float | None = None
    """What attention and MLP are multiplied by before they are added."""
    is_parallel: bool = False
    """Whether the MLP reads what attention reads, or another norm of it."""
    adds_first: bool = False
    """Whether what both make is added before the residual."""
    mixer: str = "self_attn"
    """Name of its attention, or of what mixes tokens in its place."""
    ffn: str = "mlp"
    """Name of its MLP, or of its mixture of experts."""
    shared: str | None = None
    """Name of an MLP beside the mixture, which reads what that reads, if there is one."""
    beside: ExpertsBeside | None = None
    """Experts beside its MLP, if there are such."""
    input: LayerInput | None = None
    """What adds an input of the layer's own, if it has one."""
    factor: float = 1.0
    """What its output is multiplied by."""
    returns_pair: bool = False
    """Whether it returns its output beside the weights of its attention, of which there are none here."""

    def returned(self, output: Tensor) -> Any:
        """Returns what the layer does when it is called."""
        return (output, None) if self.returns_pair else output


class FusedDecoderLayer(nn.Module):
    """A decoder layer: attention and MLP with residuals, whose sum and the norm that reads it are one pass."""

    def __init__(self, layer: Any, form: LayerForm) -> None:
        super().__init__()
        self.form = form
        for name in (*form.names, form.mixer, form.ffn, form.shared, *(form.beside or ()), *(form.input or ())):
            if name is not None:
                setattr(self, name, getattr(layer, name))
        self.next_norm: FusedRMSNorm | None = None

    @property
    def mixer(self) -> nn.Module:
        return cast(nn.Module, getattr(self, self.form.mixer))

    @property
    def ffn(self) -> nn.Module:
        """The MLP, or the mixture of experts."""
        return cast(nn.Module, getattr(self, self.form.ffn))

    @property
    def shared(self) -> Any:
        """The MLP beside the mixture, which reads what that reads; None if there is none."""
        return None if self.form.shared is None else getattr(self, self.form.shared)

    @property
    def norms(self) -> LayerNorms:
        """The norms, None where the layer has none."""
        return LayerNorms(*(None if name is None else getattr(self, name) for name in self.form.names))

    def lead_to(self, norm: FusedRMSNorm) -> None:
        """Has the layer do the work of the norm that is next to read what it returns along with its last sum, and add
        the segments of products along with the sums behind them, unless a norm reads the products."""
        self.next_norm = norm
        for part in (self.mixer, self.ffn):
            if isinstance(part, FusedAttention | FusedMLP) and self.form.names.added is None:
                part.leaves_sum = True

    def forward(self, hidden_states: Tensor, layer_input: Tensor | None = None, **kwargs: Any) -> Any:
        """Returns the output [1, T, H] for rows [1, T, H] and inputs of the layer's own [1, T, N]."""
        return self.form.returned(self._output(hidden_states, layer_input, **kwargs))

    def _output(self, hidden_states: Tensor, layer_input: Tensor | None, **kwargs: Any) -> Tensor:
        norms = self.norms
        read = hidden_states if norms.attention is None else norms.attention(hidden_states)
        mixed = _first_of(self.mixer(hidden_states=read, **kwargs))
        if self.form.is_parallel:
            return self._ended(self._sum_of_parallel(hidden_states, read, mixed), layer_input)
        residual, normed = self._add_and_norm(hidden_states, self._finished(mixed, norms.attended))
        out = self._finished(self._fed_forward(residual, normed), norms.added)
        if self.next_norm is not None:
            return self.next_norm.add_ahead(residual, out)
        return self._ended(cast(Tensor, residual + out), layer_input)

    def _sum_of_parallel(self, x: Tensor, read: Tensor, mixed: Tensor) -> Tensor:
        """Returns the sum of a row, what has been mixed of it and what the MLP makes of it."""
        names, norms = self.form.names, self.norms
        fed = self._fed_forward(x, read if names.mlp == names.attention else cast(Any, norms.mlp)(x))
        mixed, fed = self._finished(mixed, norms.attended), self._finished(fed, norms.added)
        return cast(Tensor, x + (mixed + fed) if self.form.adds_first else x + mixed + fed)

    def _fed_forward(self, residual: Tensor, normed: Tensor) -> Any:
        out = _first_of(self.ffn(normed))  # gpt-oss returns a router's scores, too
        if self.form.beside is not None:
            return self._with_experts(residual, out, self.form.beside)
        return out if self.form.shared is None else out + self.shared(normed)

    def _with_experts(self, residual: Tensor, out: Tensor, names: ExpertsBeside) -> Tensor:
        """Returns the sum of what the MLP has made, and of what experts make of the layer's sum."""
        router, experts, norm, added, of_mlp = (getattr(self, name) for name in names)
        rows = residual[0]
        _, weights, chosen = router(rows)
        return cast(Tensor, of_mlp(out) + added(experts(norm(rows), chosen, weights))[None])

    def _finished(self, added: Any, norm: Any | None) -> Any:
        """Returns what is added to the residual."""
        normed = added if norm is None else norm(added)
        return normed if self.form.multiplier is None else normed * self.form.multiplier

    def _ended(self, total: Tensor, layer_input: Tensor | None) -> Tensor:
        """Returns the sum with the layer's own input, times its factor."""
        if self.form.input is not None:
            assert layer_input is not None, "such a layer has an input of its own"
            gate, projection, norm = (getattr(self, name) for name in self.form.input)
            gated = nn.functional.gelu(gate(total), approximate="tanh") * layer_input
            total = total + norm(projection(gated))
        return total if self.form.factor == 1.0 else total * self.form.factor

    def _add_and_norm(self, residual: Tensor, x: Any) -> tuple[Tensor, Tensor]:
        """Returns the sum, and what an MLP that reads it gets."""
        if self.norms.mlp is not None:
            return cast("tuple[Tensor, Tensor]", self.norms.mlp.add_and_norm(residual, x))
        total = residual + x
        return total, total


def _first_of(output: Any) -> Any:
    return output[0] if type(output) is tuple else output
