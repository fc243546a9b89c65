"""The PyTorch backend, described; PyTorch itself is imported by the modules beside this one."""

from d5suite.levels.backend import MORE_OPERATORS, SINGLE_OPERATORS, ZOO_OPERATORS, Backend, Tolerance

BACKEND = Backend(
    name="torch",
    title="PyTorch",
    package="d5suite.backends.torch",
    requires=("torch",),
    distributions=("torch",),
    install="pip install 'd5suite[torch]'",
    modes={
        "eager": "native calls one by one, images stored N, C, H, W",
        "channels_last": "native calls one by one, images stored N, H, W, C",
        "compile": "forward and backward through torch.compile; the optimizer native",
    },
    levels=frozenset({0, 1, 2}),
    devices=("cpu", "cuda"),
    precisions=("fp32", "bf16", "fp16", "fp64"),
    operators=ZOO_OPERATORS | MORE_OPERATORS,
    single_operators=SINGLE_OPERATORS,
    tolerances={
        "fp64": Tolerance(
            outputs=1e-10,
            gradients=4,
            trajectory=1e-10,
            reason="rounding: seen 1e-15 in outputs and losses on ResNet-50, 64 px",
        ),
        "fp32": Tolerance(
            outputs=5e-5,
            gradients=4,
            trajectory=1e-2,
            reason="rounding: seen 3.5e-7 in outputs on ResNet-50 and 1.7e-5 on VGG-19, 4e-4 in gradients and "
            "1.1e-6 in losses on ResNet-50; a ReLU that a rounding flips moves a gradient by 2.2e-2, and "
            "elsewhere moved losses by 1.9e-3",
        ),
        "bf16": Tolerance(
            outputs=0.2,
            gradients=2,
            trajectory=0.1,
            reason="8 significant bits: seen 7.9e-2 in outputs on Inception v1; gradients and losses are estimates",
        ),
        "fp16": Tolerance(
            outputs=0.03,
            gradients=4,
            trajectory=0.05,
            reason="11 significant bits: seen 9.2e-4 in outputs and 2.4e-2 in losses of 20 steps on a network of every "
            "operator, 4.0e-4 and 5e-5 on ResNet-18, 64 px; an eighth of bf16's",
        ),
    },
    absent={
        "loader:tfrecord": "PyTorch has no reader of TFRecord files of its own",
        "loader:recordio": "PyTorch has no reader of RecordIO files of its own",
    },
    expected_failures={
        "test_[as][du][db]_uint16_cpu": "PyTorch has no arithmetic on unsigned integers of more than 8 bits",
        "test_[as][du][db]_uint32_cpu": "PyTorch has no arithmetic on unsigned integers of more than 8 bits",
        "test_[as][du][db]_uint64_cpu": "PyTorch has no arithmetic on unsigned integers of more than 8 bits",
        "test_attention_4d_fp16_cpu": "a float16 rounding more than in ONNX's evaluator: 1.4e-3 where 1e-3 is accepted",
        "test_attention_4d_causal_fp16_cpu": "a float16 rounding more than in ONNX's evaluator: 1.04e-3 where 1e-3 is "
        "accepted",
    },
)
