"""Why the router's own requests are greedy: on CPUs vLLM 0.32 computes wrong tokens for greedy requests whose drafts it
verifies in a step with a request that has a temperature.
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils


def test_vllm_for_cpus_divides_verified_logits_by_memory_that_nothing_has_written() -> None:
    """It gives its kernel a copy of the buffer for the temperatures of all drafts, since they are no integers."""
    current_platform.import_kernels()
    temperatures, last_drafts, unwritten = torch.tensor([0.0, 0.5]), torch.tensor([3, 5]), 7.0
    found = torch.full((5,), unwritten)
    cpu_triton_utils._expand_kernel_impl(found, temperatures, last_drafts, 0, 1)
    assert found.tolist() == [unwritten] * 5, "vLLM has mended it: [1, 1, 1, 0.5, 0.5]"
