// A custom operator as a PyTorch library operator, with D5_INPUTS inputs and D5_OUTPUTS outputs.
// For CUDA where D5_CUDA is defined.
#include <torch/library.h>
#include <ATen/ATen.h>
#ifdef D5_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include <array>
#include <string>
#include <vector>

#include "d5suite_operator.h"

extern "C" const char d5_operator_name[];
extern "C" const d5_attribute d5_attributes[];
extern "C" const int32_t d5_attribute_count;

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

template <size_t N>
std::array<d5_tensor, N> DescribeAll(const std::vector<at::Tensor> &tensors) {
    std::array<d5_tensor, N> described;
    for (size_t i = 0; i < N; ++i) described[i] = Describe(tensors[i]);
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
    const auto described = DescribeAll<D5_INPUTS>(inputs);
    d5_call call = {};
    call.inputs = described.data();
    call.input_count = D5_INPUTS;
    call.output_count = D5_OUTPUTS;
    call.attributes = d5_attributes;
    call.attribute_count = d5_attribute_count;
    call.stream = Stream();
    std::vector<at::Tensor> outputs;
    for (int32_t i = 0; i < D5_OUTPUTS; ++i) {
        int64_t shape[D5_MAX_RANK];
        int32_t rank = 0;
        Check(d5_output_shape(&call, i, shape, &rank));
        outputs.push_back(at::empty(at::IntArrayRef(shape, rank), inputs[0].options().dtype(ScalarType(types[i]))));
    }
    const auto written = DescribeAll<D5_OUTPUTS>(outputs);
    call.outputs = written.data();
    Check(d5_forward(&call));
    return outputs;
}

#ifdef D5_HAS_BACKWARD
std::vector<at::Tensor> Backward(at::TensorList given, at::TensorList results, at::TensorList gradients) {
    const std::vector<at::Tensor> inputs = Dense(given), outputs = Dense(results), heads = Dense(gradients);
    std::vector<at::Tensor> answers;
    for (const at::Tensor &input : inputs) answers.push_back(at::empty_like(input));
    const auto i = DescribeAll<D5_INPUTS>(inputs);
    const auto o = DescribeAll<D5_OUTPUTS>(outputs);
    const auto h = DescribeAll<D5_OUTPUTS>(heads);
    auto a = DescribeAll<D5_INPUTS>(answers);
    for (size_t k = 0; k < D5_INPUTS; ++k) {
        if (!inputs[k].is_floating_point()) a[k].data = nullptr;
    }
    d5_call call = {};
    call.inputs = i.data();
    call.outputs = o.data();
    call.output_gradients = h.data();
    call.input_gradients = a.data();
    call.input_count = D5_INPUTS;
    call.output_count = D5_OUTPUTS;
    call.attributes = d5_attributes;
    call.attribute_count = d5_attribute_count;
    call.stream = Stream();
    Check(d5_backward(&call));
    return answers;
}
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(d5suite, library) {
    library.def((std::string(d5_operator_name) + "(Tensor[] inputs, int[] types) -> Tensor[]").c_str());
#ifdef D5_HAS_BACKWARD
    library.def((std::string(d5_operator_name) +
                 "_backward(Tensor[] inputs, Tensor[] outputs, Tensor[] gradients) -> Tensor[]").c_str());
#endif
}

#ifdef D5_CUDA
TORCH_LIBRARY_IMPL(d5suite, CUDA, library) {
#else
TORCH_LIBRARY_IMPL(d5suite, CPU, library) {
#endif
    library.impl(d5_operator_name, &Forward);
#ifdef D5_HAS_BACKWARD
    library.impl((std::string(d5_operator_name) + "_backward").c_str(), &Backward);
#endif
}
