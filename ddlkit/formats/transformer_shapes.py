"""FLOP and tensors by the shape of a GPT-like decoder, of which a CSV may hold several; times in proportion.

FLOP follow from the matrices alone, as in Kaplan et al. 2020 (arXiv 2001.08361), Tab 1: a matrix
of P elements costs 2 P FLOP a token in the forward pass and twice that in the backward one. Attention of T
tokens has two more products in each head, together 4 T d_model FLOP a token, of the whole square and not of
its lower half, as in Chowdhery et al. 2022 (arXiv 2204.02311), App B. All else counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddlkit.core.errors import UserError
from ddlkit.formats.contract import ImportOptions, ReadProfile
from ddlkit.formats.flop_counts import Tensor, profile_of
from ddlkit.store.sheet import Column, Schema, Sheet, read_sheet

MOST_LAYERS, MOST_SIZE = 1_000, 10_000_000
"""Of a transformer: the largest have some hundred layers, and less than a million of anything else."""
REQUIRED = ("layers", "d_model", "heads", "d_ff", "vocabulary")
SHAPES = Schema(
    "shapes of transformers",
    (
        Column("name", "str", "named"),
        *(Column(name, "int", "positive") for name in REQUIRED),
        Column("positions", "int", "non_negative", default="0"),
        Column("attention_matrices", "int", "positive", default="2"),
        Column("ff_matrices", "int", "positive", default="2"),
        Column("norm_tensors", "int", "positive", default="2"),
        Column("biased", "bool", default="True"),
        Column("tied", "bool", default="True"),
    ),
    key=("name",),
)


def matches(text: str) -> bool:
    """Return whether the first line has the columns of a shape."""
    names = {name.strip() for name in text.partition("\n")[0].split(",")}
    return set(REQUIRED) <= names


def read(text: str, file: str, options: ImportOptions) -> ReadProfile:
    """Return the shape of that network, or the only one, as a profile at that sequence, batch and rate."""
    shapes, name = read_shapes(read_sheet(text, file)), options.network or ""
    if not name and len(shapes) == 1:
        name = next(iter(shapes))
    if name not in shapes:
        what = f"no transformer {name!r}" if name else "several transformers"
        raise UserError(f"{file}: {what}: choose one by --network: {', '.join(shapes)}")
    if options.sequence is None:
        raise UserError(f"{file}: FLOP depend on the sequence: say --sequence")
    tensors = list(shapes[name].tensors(options.sequence))
    return profile_of(tensors, name, file, options)


def read_shapes(sheet: Sheet) -> dict[str, Decoder]:
    """Return shapes by name."""
    shapes = {}
    for row in SHAPES.frame(sheet, exact=False).to_dict("records"):
        name = str(row.pop("name"))
        try:
            shapes[name] = Decoder(**row)
        except UserError as error:
            raise UserError(f"{sheet.file}: {name}: {error}") from error
    return shapes


@dataclass(frozen=True)
class Decoder:
    """A stack of ``layers`` blocks of attention and feed-forward between an embedding and a head.

    positions : learned positions, each a row of an embedding
    attention_matrices : 2: of query, key and value together and of the output; 4: of each
    ff_matrices, norm_tensors : 3 of a gated one (SwiGLU), 1 of a scale alone (RMSNorm)
    biased : whether matrices have a bias, the head's aside, which has a matrix unless ``tied``
    """

    layers: int
    d_model: int
    heads: int
    d_ff: int
    vocabulary: int
    positions: int = 0
    attention_matrices: int = 2
    ff_matrices: int = 2
    norm_tensors: int = 2
    biased: bool = True
    tied: bool = True

    def __post_init__(self) -> None:
        sizes = tuple(getattr(self, name) for name in REQUIRED)
        if self.layers > MOST_LAYERS or max(*sizes, self.positions) > MOST_SIZE:
            limits = f"1 to {MOST_LAYERS} layers, and to {MOST_SIZE} of all else"
            raise UserError(
                f"a transformer of {sizes}, {self.positions} positions: {limits}"
            )
        if self.d_model % self.heads:
            raise UserError(f"{self.heads} heads do not share d_model {self.d_model}")
        allowed = {
            "attention_matrices": (2, 4),
            "ff_matrices": (2, 3),
            "norm_tensors": (1, 2),
        }
        for name, counts in allowed.items():
            if getattr(self, name) not in counts:
                raise UserError(
                    f"{name} {getattr(self, name)}: must be one of {counts}"
                )

    def tensors(self, tokens: int) -> Iterator[Tensor]:
        """Yield every tensor in forward order; FLOP of one sample of ``tokens`` tokens.

        A matrix's stand with its bias, if any; attention's with the last matrix that feeds it, a tied head's
        with the norm before it: whose gradients wait.
        """
        most = self.positions or MOST_SIZE
        if not 1 <= tokens <= most:
            raise UserError(f"a sequence of {tokens} tokens: from 1 to {most} of them")
        width, head = self.d_model, 2.0 * self.d_model * self.vocabulary * tokens
        yield Tensor("tokens.weight", "tokens", self.vocabulary * width, 0.0)
        if self.positions:
            yield Tensor("positions.weight", "positions", self.positions * width, 0.0)
        fused = self.attention_matrices == 2
        inputs = ("query_key_value",) if fused else ("query", "key", "value")
        for block in (f"{number}." for number in range(self.layers)):
            yield from self._norm(f"{block}attention_norm", 0.0)
            for name in inputs:
                attended = 4.0 * tokens * tokens * width if name == inputs[-1] else 0.0
                outputs = 3 * width if fused else width
                yield from self._matrix(
                    f"{block}{name}", width, outputs, tokens, attended
                )
            yield from self._matrix(f"{block}output", width, width, tokens)
            yield from self._norm(f"{block}ff_norm", 0.0)
            for name in ("up", "gate")[: self.ff_matrices - 1]:
                yield from self._matrix(f"{block}{name}", width, self.d_ff, tokens)
            yield from self._matrix(f"{block}down", self.d_ff, width, tokens)
        yield from self._norm("norm", head if self.tied else 0.0)
        if not self.tied:
            yield Tensor("head.weight", "head", width * self.vocabulary, head)

    def _matrix(
        self, layer: str, inputs: int, outputs: int, tokens: int, attended: float = 0.0
    ) -> Iterator[Tensor]:
        flops = 2.0 * inputs * outputs * tokens + attended
        yield Tensor(
            f"{layer}.weight", layer, inputs * outputs, 0.0 if self.biased else flops
        )
        if self.biased:
            yield Tensor(f"{layer}.bias", layer, outputs, flops)

    def _norm(self, layer: str, flops: float) -> Iterator[Tensor]:
        *others, last = ("scale", "shift")[: self.norm_tensors]
        yield from (
            Tensor(f"{layer}.{name}", layer, self.d_model, 0.0) for name in others
        )
        yield Tensor(f"{layer}.{last}", layer, self.d_model, flops)
