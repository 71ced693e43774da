"""The statements about PyTorch's cost models, as readers see them."""

import pytest

from workbook.common.claims import Claim, load_claims
from workbook.pytorch import statements
from workbook.site import verdicts


def about_pytorch() -> list[Claim]:
    """Return the claims about PyTorch's cost models."""
    return [claim for claim in load_claims() if claim.paper == "pytorch"]


def test_every_claim_has_a_sentence_and_every_sentence_a_claim() -> None:
    assert set(statements.SENTENCES) == {claim.id for claim in about_pytorch()}


def test_the_table_has_the_numbers_and_verdicts_of_the_claims() -> None:
    rows = verdicts.shown(verdicts.evaluate(about_pytorch()))
    table = statements.table(rows)
    assert table["requirement"].is_unique
    stated = [row["printed"].replace(" us", " µs") for row in rows]
    assert table["required"].tolist() == stated
    returned = [row["computed"].replace(" us", " µs") for row in rows]
    assert table["returned"].tolist() == returned
    assert table["outcome"].tolist() == [row["outcome"] for row in rows]


def test_a_claim_without_a_sentence_is_refused() -> None:
    row = {"id": "pytorch-unknown", "printed": "1", "computed": "1", "outcome": "open"}
    with pytest.raises(KeyError, match="pytorch-unknown"):
        statements.table([row])
