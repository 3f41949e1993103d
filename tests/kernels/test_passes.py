"""A pass is compiled with the products of its own weights alone: both would lengthen the first start."""

from __future__ import annotations

import pytest

from baton.kernels.cpu.fused.passes import RUN_BFLOAT16, RUN_INT8
from baton.kernels.cpu.gemm.int8_gemm import HAS_INT8_PRODUCTS
from baton.kernels.cpu.omp import Kernel
from testkit.layers import HAS_OWN_PRODUCTS

pytestmark = pytest.mark.skipif(
    not (HAS_OWN_PRODUCTS and HAS_INT8_PRODUCTS), reason="this CPU lacks the products of one kind"
)
# Parts of the symbols of compiled functions: their modules.
MODULES = {
    "bfloat16": ("small_gemm", "tile_gemm", "wide_gemm"),
    "int8": ("int8_rows", "int8_vnni", "int8_avx2", "int8_tiles"),
}


def kinds_in(kernel: Kernel) -> set[str]:
    """The kinds of weights whose products are in a kernel's compiled code."""
    symbols = [function.name for function in kernel.compiled._library._get_module_for_linking().functions]
    return {kind for kind, modules in MODULES.items() if any(name in one for name in modules for one in symbols)}


@pytest.mark.parametrize(("kernel", "kind"), [(RUN_BFLOAT16, "bfloat16"), (RUN_INT8, "int8")], ids=MODULES)
def test_a_pass_has_the_products_of_its_own_weights_alone(kernel: Kernel, kind: str) -> None:
    assert kinds_in(kernel) == {kind}
