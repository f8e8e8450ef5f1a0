"""Kinds of kernels by real names, and gaps by hand."""

import pytest
import torch
from torch import nn

from vicinal.benchmarks.bench.profiling import OTHER, WAITING, by_kind, kind_of, profiled
from vicinal.models import pool_kernels

CONV = "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16"
NORM = "void at::native::batch_norm_transform_input_channels_last_kernel<float, float, 4>"
RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::launch_clamp_scalar>"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (CONV, "matrix products"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688dgrad_optimized_tf32>", "matrix products"),
        ("aten::mkldnn_convolution", "matrix products"),
        ("aten::convolution_backward", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("aten::bmm", "matrix products"),
        (NORM, "normalization"),
        ("void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>", "normalization"),
        ("aten::native_batch_norm_backward", "normalization"),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata, FusedAdamMathFunctor>", "optimizer"),
        ("aten::_foreach_lerp_", "optimizer"),
        ("triton_poi_fused_add_relu_3", "fused by a compiler"),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>", "copies and layout"),
        ("Memcpy DtoD (Device -> Device)", "copies and layout"),
        ("aten::copy_", "copies and layout"),
        ("void at::native::max_pool_backward_nhwc<float, float>", "pooling"),
        *((name, "pooling") for name in pool_kernels.NAMES),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reductions"),
        (RELU, "elementwise"),
        ("aten::threshold_backward", "elementwise"),
        ("norm_backward", "normalization"),
        ("average", "normalization"),
        ("read_stream", "labels"),
        ("something nobody has seen", OTHER),
    ],
)
def test_kinds_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_gaps_are_waiting() -> None:
    found = by_kind([(CONV, 0.0, 4.0), (NORM, 6.0, 7.0), (RELU, 7.0, 10.0)], steps=2)
    assert found.total == 5.0
    assert found.kinds == {"matrix products": 2.0, WAITING: 1.0, "normalization": 0.5, "elementwise": 1.5}


def test_what_overlaps_is_not_counted_twice() -> None:
    # One inside another, one that sticks out, given in another order.
    found = by_kind([(RELU, 3.0, 8.0), (CONV, 0.0, 5.0), (NORM, 1.0, 2.0)], steps=1, scale=10.0)
    assert found.total == 80.0
    assert found.kinds == {"matrix products": 50.0, "elementwise": 30.0}


def test_nothing_ran() -> None:
    assert by_kind([], steps=3).total == 0.0


def test_a_convolution_on_a_cpu_is_matrix_products() -> None:
    layer, x = (
        nn.Conv2d(64, 64, 3),
        torch.randn(8, 64, 64, 64),
    )  # so much more that a busy machine cannot hide it
    found = profiled(lambda: torch.relu(layer(x)), torch.device("cpu"), steps=2)
    assert found.kinds["matrix products"] > found.kinds["elementwise"] > 0
    assert sum(found.kinds.values()) == pytest.approx(found.total, rel=0.05)
