"""Description of the ONNX Runtime backend. Importing it does not import onnxruntime."""

from d5suite.levels.backend import Backend
from d5suite.levels.description import Tolerance
from d5suite.network.graph import Node
from d5suite.network.nodes.context import NodeContext
from d5suite.network.operators import MORE_OPERATORS, SINGLE_OPERATORS, ZOO_OPERATORS
from d5suite.network.variants import INTEGERS, POOLS, interpolated, with_attribute, with_spatial_axes, without_kernels

INFERENCE_ONLY = "onnxruntime does inference only; its training build is a separate package"
WHOLE_GRAPH = "onnxruntime runs the whole ONNX graph, so no operator is implemented on its own"
NEWER = "the test is written in an opset newer than onnxruntime reads; d5suite's networks are not"


_SHORT = ("int16", "uint16")
_NO_KERNELS = {
    **dict.fromkeys(("ArgMax", "ArgMin", "Clip", "Max", "Min", "Pad"), _SHORT),
    **dict.fromkeys(("Col2Im", "GridSample"), INTEGERS),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), (*_SHORT, "int32", "int64")),
    **dict.fromkeys(("Einsum", "Trilu"), (*_SHORT, "int8", "uint8")),
    **dict.fromkeys(("Gemm", "PRelu"), ("int32", "int64")),
    "OneHot": (*_SHORT, "int8", "uint8"),
    "Relu": (*_SHORT, "int64"),
    "Resize": (*_SHORT, "int64"),
}


def _loaded_only(node: Node, context: NodeContext) -> str:
    """Return why onnxruntime fails to run a node that it loads; empty if it does not fail."""
    kind, settings = node.op_type, node.attributes
    same = kind in ("Conv", *POOLS) and str(settings.get("auto_pad", "")).startswith("SAME")
    if same and max(settings.get("dilations") or [1]) > 1:
        return f"onnxruntime has no dilations with auto_pad {settings['auto_pad']}"
    cubic = kind == "GridSample" and settings.get("mode") == "cubic" and len(context.shapes.get(node.inputs[0], ())) > 4
    return "onnxruntime has no cubic samples of volumes" if cubic else ""


BACKEND = Backend(
    name="onnxruntime",
    title="ONNX Runtime",
    package="d5suite.backends.onnxruntime",
    requires=("onnxruntime",),
    distributions=("onnxruntime", "onnxruntime-gpu"),
    install="pip install onnxruntime",
    modes={"all": "every graph optimization", "basic": "only those that remove redundancy"},
    levels=frozenset({1}),
    devices=("cpu",),
    precisions=("fp32",),
    operators=(ZOO_OPERATORS | MORE_OPERATORS | SINGLE_OPERATORS | {"NonZero", "RNN", "Shrink"}) - {"GlobalLpPool"},
    variants=(
        with_attribute(("LRN",), "size", range(0, 1 << 16, 2), "onnxruntime's LRN supports odd sizes only"),
        with_attribute(("GRU", "LSTM"), "layout", (1,), "onnxruntime takes no layout with the batch first"),
        with_spatial_axes(POOLS, "onnxruntime has no pool over other than 1 to 3 spatial axes"),
        without_kernels(_NO_KERNELS, "onnxruntime has no kernel for these integers"),
        _loaded_only,
        interpolated,
    ),
    tolerances={
        "fp32": Tolerance(
            outputs=5e-5,
            gradients=1,
            trajectory=1,
            reason="float32 rounding: seen 6e-7 on single operators; there are no gradients and no training",
        )
    },
    absent={
        "stock": "the mode all is ONNX Runtime with no option set",
        "cuda": "this backend is for the CPU build",
        "bf16": "the CPU build has no bfloat16 convolution",
        "fp16": "the CPU build has no float16 convolution",
        "fp64": "the CPU build has no float64 convolution",
        "gradient": INFERENCE_ONLY,
        "level 0": WHOLE_GRAPH,
        "level 2": INFERENCE_ONLY,
        "level 3": INFERENCE_ONLY,
        "training": INFERENCE_ONLY,
        "distributed": INFERENCE_ONLY,
        "baseline": INFERENCE_ONLY,
        "operators": WHOLE_GRAPH,
        "GlobalLpPool": "the CPU build has no kernel for it",
        "custom": WHOLE_GRAPH,
        "loader": "onnxruntime has no image loader",
    },
    on_request="it does inference only, and serves as the reference of the others",
    reads_files=True,
    expected_failures={
        **dict.fromkeys(
            (
                "*test_attention_*window*", "*test_depthtospace_*", "*test_spacetodepth_*",
                "*test_reduce_log_sum_exp_empty_set_cpu*", "*test_reduce_log_sum_exp_*_expanded_cpu*",
                "*test_reversesequence_*", "*test_mod_*_fmod_0_*", "*test_mod_mixed_sign_float32_cpu*",
                "*test_onehot_with_*axis_cpu*", "*test_range_float_type_positive_delta_cpu*",
                "*may_be_computed?Einsum*",
            ),
            NEWER,
        ),
        "*test_attention_4d_diff_heads_mask4d_padded_kv_cpu*": "onnxruntime takes no mask beside the lengths of keys",
        **dict.fromkeys(
            ("*test_dft_axis*", "*test_dft_cpu*", "*test_dft_inverse*", "*test_dft_opset19*", "*test_dft_rfft*"),
            "onnxruntime's transform of a length that is no power of two is off by 3e-7 of the largest value",
        ),
        "*test_maxunpool_export_with_output_shape*": "onnxruntime counts indices in the shape asked for",
        "*test_pow_types_float32_uint*": "onnxruntime has no power of float32 and unsigned integers",
    },
)  # fmt: skip
