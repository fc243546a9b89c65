// A custom operator as a PyTorch library operator. This file does not depend on the operator, because PyTorch's headers
// are slow to compile. For CUDA where D5_CUDA is defined.
#include <torch/library.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#ifdef D5_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <string>
#include <vector>

#include "d5suite_glue.h"

namespace {

int32_t Dtype(at::ScalarType type) {
    switch (type) {
        case at::kFloat: return D5_FLOAT32;
        case at::kDouble: return D5_FLOAT64;
        case at::kHalf: return D5_FLOAT16;
        case at::kBFloat16: return D5_BFLOAT16;
        case at::kLong: return D5_INT64;
        case at::kInt: return D5_INT32;
        case at::kChar: return D5_INT8;
        case at::kByte: return D5_UINT8;
        case at::kBool: return D5_BOOL;
        default: TORCH_CHECK(false, "custom operator ", d5_operator_name, ": unsupported type ", type);
    }
}

d5_tensor Describe(const at::Tensor &tensor) {
    return {tensor.defined() ? tensor.data_ptr() : nullptr, tensor.sizes().data(),
            static_cast<int32_t>(tensor.dim()), Dtype(tensor.scalar_type())};
}

std::vector<d5_tensor> DescribeAll(const std::vector<at::Tensor> &tensors) {
    std::vector<d5_tensor> described;
    described.reserve(tensors.size());
    for (const at::Tensor &tensor : tensors) described.push_back(Describe(tensor));
    return described;
}

void *Stream() {
#ifdef D5_CUDA
    return c10::cuda::getCurrentCUDAStream().stream();
#else
    return nullptr;
#endif
}

void Check(int code) {
    TORCH_CHECK(code == D5_OK, "custom operator ", d5_operator_name, " failed with code ", code);
}

std::vector<at::Tensor> Dense(at::TensorList tensors) {
    std::vector<at::Tensor> dense;
    dense.reserve(tensors.size());
    for (const at::Tensor &tensor : tensors) dense.push_back(tensor.contiguous());
    return dense;
}

at::ScalarType ScalarType(int64_t dtype) {
    switch (dtype) {
        case D5_FLOAT32: return at::kFloat;
        case D5_FLOAT64: return at::kDouble;
        case D5_FLOAT16: return at::kHalf;
        case D5_BFLOAT16: return at::kBFloat16;
        case D5_INT64: return at::kLong;
        case D5_INT32: return at::kInt;
        case D5_INT8: return at::kChar;
        case D5_UINT8: return at::kByte;
        case D5_BOOL: return at::kBool;
        default: TORCH_CHECK(false, "custom operator ", d5_operator_name, ": unsupported type number ", dtype);
    }
}

// `types` are the outputs' types, with ONNX's numbers.
std::vector<at::Tensor> Forward(at::TensorList given, at::IntArrayRef types) {
    const std::vector<at::Tensor> inputs = Dense(given);
    const auto described = DescribeAll(inputs);
    d5_call call = NewCall(described, types.size(), Stream());
    std::vector<at::Tensor> outputs;
    for (int32_t i = 0; i < call.output_count; ++i) {
        int64_t shape[D5_MAX_RANK];
        int32_t rank = 0;
        Check(d5_output_shape(&call, i, shape, &rank));
        outputs.push_back(at::empty(at::IntArrayRef(shape, rank), inputs[0].options().dtype(ScalarType(types[i]))));
    }
    const auto written = DescribeAll(outputs);
    call.outputs = written.data();
    Check(d5_forward(&call));
    return outputs;
}

std::vector<at::Tensor> Backward(at::TensorList given, at::TensorList results, at::TensorList gradients) {
    const std::vector<at::Tensor> inputs = Dense(given), outputs = Dense(results), heads = Dense(gradients);
    std::vector<at::Tensor> answers;
    for (const at::Tensor &input : inputs) answers.push_back(at::empty_like(input));
    const auto i = DescribeAll(inputs), o = DescribeAll(outputs), h = DescribeAll(heads);
    auto a = DescribeAll(answers);
    for (size_t k = 0; k < a.size(); ++k) {
        if (!inputs[k].is_floating_point()) a[k].data = nullptr;
    }
    d5_call call = NewCall(i, o.size(), Stream());
    call.outputs = o.data();
    call.output_gradients = h.data();
    call.input_gradients = a.data();
    Check(d5_backward(&call));
    return answers;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(d5suite, library) {
    library.def((std::string(d5_operator_name) + "(Tensor[] inputs, int[] types) -> Tensor[]").c_str());
    if (d5_backward == nullptr) return;
    library.def((std::string(d5_operator_name) +
                 "_backward(Tensor[] inputs, Tensor[] outputs, Tensor[] gradients) -> Tensor[]").c_str());
}

#ifdef D5_CUDA
TORCH_LIBRARY_IMPL(d5suite, CUDA, library) {
#else
TORCH_LIBRARY_IMPL(d5suite, CPU, library) {
#endif
    library.impl(d5_operator_name, &Forward);
    if (d5_backward != nullptr) library.impl((std::string(d5_operator_name) + "_backward").c_str(), &Backward);
}
