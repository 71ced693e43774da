"""Shapes of transformers, which a CSV may list, as layer profiles.

The shape of a decoder such as GPT determines its parameter tensors and their FLOP. The
time of a tensor is in proportion to its FLOP. A matrix of P elements costs 2 P FLOP for
each token in forward, and twice that in backward (Kaplan, Table 1). Attention among T
tokens has two more products in each head. Together these cost 4 T d_model FLOP for each
token, counted for the whole square and not for its lower half (Chowdhery, Appendix B).
Everything else costs nothing.

References
----------
Kaplan : J. Kaplan et al., "Scaling Laws for Neural Language Models", 2020,
    arXiv:2001.08361.
Chowdhery : A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022,
    arXiv:2204.02311.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddlkit.core.errors import UserError
from ddlkit.formats.contract import ImportOptions, ReadProfile
from ddlkit.formats.flop_counts import Tensor, missing_for_times, profile_of
from ddlkit.store.sheet import Column, Schema, Sheet, read_sheet

MOST_LAYERS = 1_000
"""Layers of a transformer. The largest have some hundred."""

MOST_SIZE = 10_000_000
"""Anything else of a transformer. The largest have less than a million."""

REQUIRED = ("layers", "d_model", "heads", "d_ff", "vocabulary")
"""Columns that a table of shapes must have besides the name."""

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

_ALLOWED_COUNTS = {
    "attention_matrices": (2, 4),
    "ff_matrices": (2, 3),
    "norm_tensors": (1, 2),
}


def matches(text: str) -> bool:
    """Return whether the first line of a file has the columns of `REQUIRED`."""
    first_line, _, _ = text.partition("\n")
    names = {name.strip() for name in first_line.split(",")}
    return set(REQUIRED) <= names


def read(text: str, file: str, options: ImportOptions) -> ReadProfile:
    """Return one of the shapes in a file as a profile.

    The option ``network`` chooses one of several shapes, and ``sequence`` is the number of
    tokens in a sample. FLOP become times either by the rate of the device (the options
    ``peak`` and ``utilisation``) or by the time of a batch (``compute_s``). The result
    also has a finding, which is a remark for the user: the FLOP of one sample.

    `ddlkit.formats.contract` describes arguments, result and errors.
    """
    shapes = read_shapes(read_sheet(text, file))
    name = options.network or ""
    # A single shape needs no choice.
    if not name and len(shapes) == 1:
        name = next(iter(shapes))
    if name not in shapes:
        problem = f"no transformer {name!r}" if name else "several transformers"
        listed = ", ".join(shapes)
        raise UserError(f"{file}: {problem} ({listed}): choose one with --network")
    if options.sequence is None:
        remedy = "give --sequence"
        # If times are missing as well, the user should not learn it from a second error.
        missing = missing_for_times(options)
        if missing:
            remedy += f", and for the times {missing}"
        raise UserError(
            f"{file}: the FLOP count depends on the number of tokens in a sample: {remedy}"
        )
    # The error for a wrong number of tokens lacks the file and the name.
    try:
        tensors = list(shapes[name].tensors(options.sequence))
    except UserError as error:
        raise UserError(f"{file}: {name}: {error}") from error
    return profile_of(tensors, name, file, options)


def read_shapes(sheet: Sheet) -> dict[str, Decoder]:
    """Return the shapes of a table.

    Parameters
    ----------
    sheet : Sheet
        The cells of the table.

    Returns
    -------
    dict of str to Decoder
        The shapes, by name.

    Raises
    ------
    UserError
        If the table is wrong, or if a shape is impossible.
    """
    # A sheet may have further columns, which are ignored.
    rows = SHAPES.frame(sheet, exact=False).to_dict("records")
    shapes = {}
    for row in rows:
        name = str(row.pop("name"))
        try:
            # All other columns have the names of the fields of a decoder.
            shapes[name] = Decoder(**row)
        except UserError as error:
            raise UserError(f"{sheet.file}: {name}: {error}") from error
    return shapes


@dataclass(frozen=True)
class Decoder:
    """Blocks of attention and feed-forward between an embedding and a head.

    Attributes
    ----------
    layers : int
        The number of blocks.
    d_model : int
        The width of the model, which the heads share.
    heads : int
        The heads of attention in a block.
    d_ff : int
        The width of feed-forward.
    vocabulary : int
        The number of tokens that the model knows.
    positions : int
        The number of learned positions, each a row of an embedding. 0 if there are
        none.
    attention_matrices : int
        2: one for query, key and value together, and one for the output. 4: one for
        each.
    ff_matrices : int
        2: up and down. 3: a gate, too (SwiGLU).
    norm_tensors : int
        2: scale and shift. 1: only a scale (RMSNorm).
    biased : bool
        Whether matrices other than the head have a bias.
    tied : bool
        Whether the head uses the matrix of the embedding. Otherwise it has its own.

    Raises
    ------
    UserError
        If a size is too large, or if the sizes do not fit together.
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
        # Sizes far above those of the largest transformers are refused as mistakes.
        for name in (*REQUIRED, "positions"):
            size = getattr(self, name)
            most = MOST_LAYERS if name == "layers" else MOST_SIZE
            if size > most:
                raise UserError(f"column {name}: is {size}; it must be at most {most}")
        # Each head must have an equal part of the width.
        if self.d_model % self.heads:
            raise UserError(
                f"d_model {self.d_model}: must be a multiple of the {self.heads} heads"
            )
        for name, allowed in _ALLOWED_COUNTS.items():
            count = getattr(self, name)
            if count not in allowed:
                raise UserError(f"{name} {count}: must be one of {allowed}")

    def tensors(self, tokens: int) -> Iterator[Tensor]:
        """Yield the parameter tensors in forward order.

        Parameters
        ----------
        tokens : int
            The tokens of a sample.

        Yields
        ------
        Tensor
            A tensor with the FLOP of one sample.

        Raises
        ------
        UserError
            If a sample has no tokens, or more than there are positions.

        Notes
        -----
        The FLOP of an operation are counted at the tensor whose gradient is the first that
        must wait for them. Backward goes from the last tensor to the first, so this is the
        last tensor of the operation in forward order. For a matrix with a bias, it is the
        bias. Attention and a tied head have no tensor of their own. Their FLOP are counted at
        the last tensor before them, which is that of a matrix or of a norm.
        """
        # Without learned positions (0), a sample may have any number of tokens.
        most = self.positions or MOST_SIZE
        if not 1 <= tokens <= most:
            limit = f"from 1 to {most} tokens"
            if self.positions:
                limit += ", which is the number in the column positions"
            raise UserError(f"--sequence {tokens}: must be {limit}")
        width = self.d_model
        # A matrix of P elements costs 2 P FLOP for each token.
        head_flops = 2.0 * width * self.vocabulary * tokens
        # To look up a row of an embedding takes no FLOP.
        yield Tensor("tokens.weight", "tokens", self.vocabulary * width, flops=0.0)
        if self.positions:
            n_elements = self.positions * width
            yield Tensor("positions.weight", "positions", n_elements, flops=0.0)
        for number in range(self.layers):
            yield from self._block(f"{number}.", tokens)
        # A tied head uses the matrix of the embedding and has no tensor of its own. So its
        # FLOP are counted at the norm before it.
        yield from self._norm("norm", head_flops if self.tied else 0.0)
        if not self.tied:
            yield Tensor("head.weight", "head", width * self.vocabulary, head_flops)

    def _block(self, prefix: str, tokens: int) -> Iterator[Tensor]:
        """Yield the tensors of a block: of attention, then of feed-forward.

        Names of layers begin with ``prefix``. ``tokens`` is the number of tokens in a sample.
        """
        width = self.d_model
        yield from self._norm(f"{prefix}attention_norm")
        yield from self._query_key_value(prefix, tokens)
        yield from self._matrix(f"{prefix}output", width, width, tokens)
        yield from self._norm(f"{prefix}ff_norm")
        yield from self._matrix(f"{prefix}up", width, self.d_ff, tokens)
        if self.ff_matrices == 3:
            yield from self._matrix(f"{prefix}gate", width, self.d_ff, tokens)
        yield from self._matrix(f"{prefix}down", self.d_ff, width, tokens)

    def _query_key_value(self, prefix: str, tokens: int) -> Iterator[Tensor]:
        """Yield the tensors that make query, key and value, the inputs of attention.

        Names of layers begin with ``prefix``. ``tokens`` is the number of tokens in a sample.
        """
        width = self.d_model
        # Attention has two products of matrices, of 2 T d_model FLOP each for each of T
        # tokens. It has no tensor of its own, so its operations are counted at the last matrix
        # before it. Backward goes in reverse order, so the gradient of this matrix is the
        # first one that must wait for the backward of attention.
        attention_flops = 4.0 * tokens * tokens * width
        # Either one matrix makes query, key and value together, or each has its own.
        if self.attention_matrices == 2:
            layer = f"{prefix}query_key_value"
            yield from self._matrix(
                layer, width, 3 * width, tokens, attention_flops=attention_flops
            )
        else:
            yield from self._matrix(f"{prefix}query", width, width, tokens)
            yield from self._matrix(f"{prefix}key", width, width, tokens)
            layer = f"{prefix}value"
            yield from self._matrix(
                layer, width, width, tokens, attention_flops=attention_flops
            )

    def _matrix(
        self,
        layer: str,
        inputs: int,
        outputs: int,
        tokens: int,
        attention_flops: float = 0.0,
    ) -> Iterator[Tensor]:
        """Yield the weight of a matrix and its bias, if it has one.

        Two kinds of FLOP are counted: those of the matrix for all ``tokens`` of a sample,
        and the ``attention_flops`` of an attention that follows the matrix. The last of
        the yielded tensors gets both, even if it is the bias. Its gradient is ready first,
        and is taken to wait for the backward of both.
        """
        elements = inputs * outputs
        # Each element costs a multiplication and an addition for each token.
        flops = 2.0 * inputs * outputs * tokens + attention_flops
        if self.biased:
            yield Tensor(f"{layer}.weight", layer, elements, flops=0.0)
            yield Tensor(f"{layer}.bias", layer, outputs, flops)
        else:
            yield Tensor(f"{layer}.weight", layer, elements, flops)

    def _norm(self, layer: str, flops: float = 0.0) -> Iterator[Tensor]:
        """Yield the scale of a norm and its shift, if it has one.

        ``flops`` are those of a tied head that follows the norm, 0 if none does. They are
        counted at the last tensor of the norm, because a tied head has no tensor of its own:
        it uses the matrix of the embedding. The norm itself counts as no work.
        """
        if self.norm_tensors == 2:
            yield Tensor(f"{layer}.scale", layer, self.d_model, flops=0.0)
            yield Tensor(f"{layer}.shift", layer, self.d_model, flops)
        else:
            yield Tensor(f"{layer}.scale", layer, self.d_model, flops)
