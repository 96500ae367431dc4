"""Bugs that other attention kernels were reported to have, and the test that would find each here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Reports (GitHub owner left out where the project is known by its name), what went wrong, who would see it.
REPORTS = [
    ("flash-attention 2611, 1500, 1311", "offsets or grids overflow int32",
     "attention/test_triton.py::test_offsets_past_two_to_the_31_are_exact "
     "attention/test_gpu.py::test_more_than_65535_heads_of_a_batch "
     "attention/test_hopper_backward.py::test_more_than_two_to_the_31_elements"),
    ("pytorch 190857", "a backward's key offset overflows in sequence-major views",
     "attention/test_triton.py::test_offsets_past_two_to_the_31_are_exact"),
    ("vllm 47671, 50427, 50483, 42095", "page times stride overflows",
     "decode/test_triton.py::test_pages_further_away_than_32_bits_are_found"),
    ("NATTEN 347", "dQ is silently wrong past two million tokens",
     "attention/test_masks_gpu.py::test_more_than_two_million_tokens_in_a_window"),
    ("flash-attention 443, 334", "NaN in the backward of many queries and few keys, or of one",
     "attention/test_triton.py::test_every_length_matches_float64"),
    ("flash-attention 1778", "rows that see nothing are not zero; alignment",
     "attention/test_triton.py::test_queries_without_keys_give_zero_and_minus_infinity "
     "attention/test_reference.py::test_the_causal_mask_is_aligned_to_the_bottom_right"),
    ("flash-attention 978; flashinfer 4452, 4051", "log-sum-exp of no keys; two empty states merged",
     "attention/test_triton.py::test_empty_sequences_are_allowed "
     "decode/test_triton.py::test_empty_splits_and_empty_rows_count_nothing"),
    ("aiter 3551", "keys past the end overflow where none is masked",
     "attention/test_triton.py::test_keys_past_the_end_do_not_overflow_when_all_logits_are_very_negative"),
    ("FlagGems 5235", "parts are combined by the head size instead of a stride",
     "decode/test_triton.py::test_values_match_float64 decode/test_triton.py::test_strides_of_any_kind"),
    ("torchtitan 3235", "NaN in a hundredth of the steps, pages and chosen splits",
     "decode/test_gpu.py::test_pages_with_chosen_splits_repeat_under_stale_memory"),
    ("vllm-project/flash-attention 87", "splits and grouped heads in another order",
     "decode/test_triton.py::test_values_match_float64"),
    ("vllm 47305", "stale pages are read: 0 times NaN",
     "decode/test_triton.py::test_what_lies_behind_a_rows_length_is_not_read"),
    ("flash-attention 1619, 2875, 2562, 2568", "sequences of length zero",
     "attention/test_masks.py::test_documents_match_float64 "
     "decode/test_triton.py::test_empty_splits_and_empty_rows_count_nothing"),
    ("flash-attention 2754", "the second tile of a persistent program overwrites the first",
     "attention/test_hopper.py::test_a_busy_gpu_repeats_every_bit "
     "attention/test_hopper_single.py::test_a_busy_gpu_repeats_every_bit"),
    ("tilelang 2461", "padding that nobody wrote, harmless until memory held NaN",
     "attention/test_hopper_backward.py::test_every_length_matches_float64 "
     "decode/test_gpu.py::test_repeats_are_equal_to_the_bit_whatever_memory_held"),
    ("TileOPs 1787; hpc-ops 84; pegainfer 21", "pages off the tile, five tokens at once, empty splits",
     "decode/test_gpu.py::test_pages_out_of_order_beside_stale_ones "
     "decode/test_gpu.py::test_bf16_errs_at_most_twice_as_much_as_plain_torch"),
    ("NSA-triton 27", "wrong key head of a group; values of another size",
     "attention/test_triton.py::test_query_heads_share_key_heads "
     "attention/test_masks.py::test_values_may_have_their_own_head_size"),
    ("cudnn-frontend 160; pytorch 169849, 171627, 193893", "lengths off 128, few key heads",
     "attention/test_gpu.py::test_every_length_matches_float64"),
    ("triton 11366", "illegal access at head size 32",
     "attention/test_gpu.py::test_every_head_size_matches_float64"),
    ("triton 10229, 9728, 11587, 8260, 7786, 9348", "pipelined and specialised loops miscompile",
     "attention/test_hopper_compiled.py::test_no_form_spills_and_products_stay_asynchronous "
     "attention/test_hopper.py::test_long_sequences_match_float64"),
    ("triton 4469", "gradients of bf16 and of groups",
     "attention/test_gpu.py::test_every_length_matches_float64"),
    ("flash-attention 1155; pytorch 136232, 133717, 158212", "strides of zero and of any order",
     "attention/test_triton.py::test_an_expanded_output_gradient_is_read_by_its_strides "
     "attention/test_triton.py::test_contiguous_and_odd_strides_agree"),
]  # fmt: skip


@pytest.mark.parametrize(("report", "what", "tests"), REPORTS, ids=[row[0] for row in REPORTS])
def test_a_test_looks_for_it(report: str, what: str, tests: str) -> None:
    for name in tests.split():
        file, function = name.split("::")
        text = (HERE / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {function}\(", text, re.MULTILINE), (report, what, name)
