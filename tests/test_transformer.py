"""Transformers by count: parameters and FLOP as published, gradients in ready order, one time for all."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit import cli
from ddlkit.formats import ImportOptions, import_file
from ddlkit.formats.transformer_shapes import Decoder, read_shapes
from ddlkit.store.sheet import read_sheet
from workbook.common import places

SPECS = places.DATA / "specs" / "transformers.csv"
SHAPES = read_shapes(read_sheet(SPECS.read_text(), str(SPECS)))
# Of a stack with biases and two tensors a norm, as Hugging Face's gpt2 has; llama has nine a block and three.
TENSORS = {
    "gpt2": 148,
    "gpt2_medium": 292,
    "gpt2_large": 436,
    "gpt2_xl": 580,
    "llama_7b": 291,
}

shapes = st.builds(
    Decoder,
    layers=st.integers(1, 6),
    d_model=st.integers(1, 99).map(lambda head: 3 * head),
    heads=st.just(3),
    d_ff=st.integers(1, 900),
    vocabulary=st.integers(1, 900),
    attention_matrices=st.sampled_from([2, 4]),
    ff_matrices=st.sampled_from([2, 3]),
    norm_tensors=st.integers(1, 2),
    biased=st.booleans(),
    tied=st.booleans(),
)


def parameters(name: str) -> int:
    return sum(tensor.elements for tensor in SHAPES[name].tensors(1))


def flops(shape: Decoder, tokens: int) -> float:
    return sum(tensor.flops for tensor in shape.tensors(tokens))


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_that_are_published(name: str) -> None:
    printed = pd.read_csv(SPECS).set_index("name").loc[name]
    assert printed["source"]
    tensors = list(SHAPES[name].tensors(1))
    assert (
        len({tensor.name for tensor in tensors})
        == len(tensors)
        == TENSORS.get(name, 435)
    )
    if name == "cs336_xl":
        # What its source's memory report prints after creation, with rotary tables and blocks of 512 bytes.
        table, blocks = 2 * 128 * 32 * 4, len(tensors) * 512
        least = 4 * parameters(name)
        assert least < 7.4440598487854 * 2**30 < least + table + blocks
    else:
        assert parameters(name) == printed["parameters"]


@given(shapes, st.integers(1, 300))
def test_work_is_six_flop_a_parameter_of_a_product_and_attention(
    shape: Decoder, t: int
) -> None:
    """Three times forward is 6 N + 12 L H Q T a token, as PaLM, App B; N: the matrices that multiply."""
    tensors = list(shape.tensors(t))
    n = sum(
        tensor.elements
        for tensor in tensors
        if tensor.name.endswith(".weight") and tensor.layer not in ("tokens", "head")
    )
    n += shape.vocabulary * shape.d_model
    expected = 6 * n + 12 * shape.layers * shape.d_model * t
    assert 3 * flops(shape, t) == pytest.approx(expected * t)


def test_what_comes_before_a_gradient_is_done_before_it() -> None:
    """The head's work before the last norm's gradient, attention's between its output and what feeds it."""
    shape = Decoder(1, 8, 2, 32, 1000, tied=True)
    by_name = {tensor.name: tensor.flops for tensor in shape.tensors(16)}
    assert by_name["norm.shift"] == 2 * 8 * 1000 * 16
    assert by_name["0.query_key_value.bias"] == 2 * 8 * 24 * 16 + 4 * 16 * 16 * 8
    assert by_name["0.output.bias"] == 2 * 8 * 8 * 16
    assert by_name["tokens.weight"] == by_name["norm.scale"] == 0


@given(st.floats(1e-3, 1e3), st.integers(1, 64), st.integers(1, 4))
def test_times_are_in_proportion_to_work_and_make_up_the_one_given(
    compute_s: float, batch: int, element_bytes: int
) -> None:
    options = ImportOptions(
        "gpt2", batch, None, None, None, False, compute_s, 256, element_bytes
    )
    found = import_file(SPECS, None, options)
    profile, workload = found.profile, found.profile.workload()
    assert found.kind == "transformer" and profile.batch == batch
    assert workload.compute_s == pytest.approx(compute_s)
    assert workload.forward_s == pytest.approx(compute_s / 3)
    tensors = SHAPES["gpt2"].tensors(256)
    assert profile.flops == pytest.approx([batch * tensor.flops for tensor in tensors])
    assert profile.backward_s == pytest.approx(
        profile.flops * compute_s * 2 / 3 / profile.flops.sum()
    )
    assert profile.gradient_bytes.sum() == element_bytes * parameters("gpt2")


def test_accumulated_batches_add_their_computation_and_no_communication(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = profile.with_name("cost.json")
    cost.write_text('{"form": "alpha_beta", "alpha_s": 1e-3, "beta_s_per_byte": 1e-9}')
    found = []
    for m in (1, 5):
        words = f"predict --profile {profile} --cost {cost} --plan ddp --accumulate {m} --json"
        assert cli.main(words.split()) == 0
        found.append(json.loads(capsys.readouterr().out))
    one, more = found
    assert more["iteration_s"] == pytest.approx(one["iteration_s"] + 4 * 0.15)
    assert (one["compute_s"], more["compute_s"]) == pytest.approx((0.15, 5 * 0.15))
    for kept in ("communication_s", "exposed_communication_s"):
        assert more[kept] == pytest.approx(one[kept])
    assert more["scaling_factor"] > one["scaling_factor"]
