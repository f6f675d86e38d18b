"""Sizes: on Llama2-7B's shapes, and the bytes that are really there."""

import pytest
import torch
from cases import BF16_WEIGHTS, STATES, run

import lowbit


def llama2_7b(dtype=torch.bfloat16):
    """Its 291 parameters on the meta device."""
    hidden, inner, vocabulary, layers = 4096, 11008, 32000, 32
    layer = [(hidden, hidden)] * 4 + [(inner, hidden)] * 2 + [(hidden, inner)] + [(hidden,)] * 2
    shapes = [(vocabulary, hidden), *layer * layers, (hidden,), (vocabulary, hidden)]
    return [torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in shapes]


@pytest.mark.parametrize(
    "make, options, low, high",
    (
        (lowbit.AdamW8bit, {}, 2.05, 2.07),
        (lowbit.AdamWFp8, {}, 2.05, 2.07),
        (lowbit.AdamW4bit, {}, 1.15, 1.17),
        (lowbit.AdamW, {"state": "12bit"}, 1.55, 1.57),
        (lowbit.AdamW8bit, {"weights": "24bit"}, 3.05, 3.07),
        (lowbit.AdamW8bit, {"weights": "32bit"}, 4.05, 4.07),
        (lowbit.AdamW, {"state": "bf16"}, 4.0, 4.01),
        (lowbit.AdamW, {"state": "fp32"}, 8.0, 8.0),
    ),
)
def test_bytes_a_parameter_of_llama2_7b(make, options, low, high):
    parameters = llama2_7b()
    summary = make(parameters, **options).summary()
    assert len(parameters) == 291 and summary.params == 6_738_415_616
    assert low <= summary.bytes_per_param <= high
    assert summary.bytes == sum(row.bytes for row in summary.rows)
    assert sum(row.tensors for row in summary.rows) == 291


def test_norms_keep_fp32_state():
    rows = {row.state: row for row in lowbit.AdamW4bit(llama2_7b()).summary().rows}
    assert rows["fp32"].tensors == 65 and rows["fp32"].params == 65 * 4096
    assert rows["4bit"].tensors == 226


@pytest.mark.parametrize("weights", BF16_WEIGHTS)
@pytest.mark.parametrize("state", STATES)
def test_the_summary_is_what_is_allocated(state, weights):
    """After steps, and after ``init_states`` alone, on ragged shapes too."""
    model = torch.nn.Sequential(torch.nn.Linear(70, 65), torch.nn.Conv2d(8, 16, 7), torch.nn.LayerNorm(100)).bfloat16()
    optimizer = lowbit.AdamW(model.parameters(), state=state, weights=weights)
    promised = optimizer.summary()
    assert not optimizer.state
    optimizer.init_states()

    def allocated():
        tensors = [x for s in optimizer.state.values() for name, x in s.items() if name != "step"]
        return sum(x.untyped_storage().nbytes() for x in tensors)

    assert allocated() == promised.bytes
    run(optimizer, list(model.parameters()), 2)
    assert allocated() == promised.bytes == optimizer.summary().bytes
    assert promised.params == sum(p.numel() for p in model.parameters())


def test_groups_and_dtypes_have_rows_of_their_own():
    ps = [torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    embedding = torch.nn.Parameter(torch.zeros(100, 64, dtype=torch.bfloat16))
    optimizer = lowbit.AdamW([{"params": ps}, {"params": [embedding], "state": "fp32", "weights": "24bit"}])
    rows = {
        (row.state, row.weights, row.dtype): (row.tensors, row.params, row.bytes) for row in optimizer.summary().rows
    }
    assert rows == {
        ("8bit", "stochastic", "bfloat16"): (1, 4096, 4096 * 2 + 4096 // 32 * 2),
        ("8bit", "nearest", "float32"): (1, 4096, 4096 * 2 + 4096 // 32 * 2),
        ("fp32", "24bit", "bfloat16"): (1, 6400, 6400 * 9),
    }
    text = str(optimizer.summary())
    assert "24bit" in text and "14,592" in text and len(text.splitlines()) == 5
    assert "total" in text.splitlines()[-1]


def test_an_empty_parameter_has_a_summary():
    summary = lowbit.AdamW([torch.nn.Parameter(torch.zeros(0, 7))]).summary()
    assert (summary.params, summary.bytes, summary.bytes_per_param) == (0, 0, 0)
    assert "total" in str(summary)
