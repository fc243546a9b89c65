// A custom operator as an MXNet library operator. This file does not depend on the operator, because it includes
// MXNet's lib_api.cc, which is slow to compile. The caller passes attributes instead: the number of `inputs`, the
// outputs' `types` as MXNet's numbers, and the ONNX `ranks` of inputs and outputs, because MXNet has no
// tensors without axes.
#include <lib_api.cc>

#include <algorithm>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "d5suite_glue.h"

namespace {

using namespace mxnet::ext;
using Attributes = std::unordered_map<std::string, std::string>;
using Tensors = std::vector<MXTensor>;
using Shapes = std::vector<std::vector<unsigned int>>;

std::vector<int> Numbers(const Attributes &attributes, const char *key) {
    std::vector<int> numbers;
    const auto found = attributes.find(key);
    if (found == attributes.end()) return numbers;
    std::stringstream text(found->second);
    for (std::string number; std::getline(text, number, ',');) numbers.push_back(std::stoi(number));
    return numbers;
}

int32_t Dtype(MXDType type) {
    switch (type) {
        case kFloat32: return D5_FLOAT32;
        case kFloat64: return D5_FLOAT64;
        case kFloat16: return D5_FLOAT16;
        case kUint8: return D5_UINT8;
        case kInt8: return D5_INT8;
        case kInt32: return D5_INT32;
        default: return D5_INT64;
    }
}

bool IsFloating(int32_t dtype) { return dtype == D5_FLOAT32 || dtype == D5_FLOAT64 || dtype == D5_FLOAT16; }

MXReturnValue Check(int code) {
    if (code == D5_OK) return MX_SUCCESS;
    MX_ERROR_MSG << "custom operator " << d5_operator_name << " failed with code " << code;
    return MX_FAIL;
}

std::vector<d5_tensor> Describe(Tensors::const_iterator first, const int *ranks, size_t count) {
    std::vector<d5_tensor> described(count);
    for (size_t i = 0; i < count; ++i, ++first) {
        described[i] = {first->data_ptr, first->shape.data(), ranks[i], Dtype(first->dtype)};
    }
    return described;
}

MXReturnValue Count(const Attributes &attributes, int *inputs, int *outputs) {
    const std::vector<int> count = Numbers(attributes, "inputs");
    *inputs = count.empty() ? 0 : count[0];
    *outputs = static_cast<int>(Numbers(attributes, "types").size());
    return *inputs && *outputs ? MX_SUCCESS : MX_FAIL;
}

MXReturnValue InferType(const Attributes &attributes, std::vector<int> *, std::vector<int> *outputs) {
    *outputs = Numbers(attributes, "types");
    return MX_SUCCESS;
}

MXReturnValue InferShape(const Attributes &attributes, Shapes *inputs, Shapes *outputs) {
    const std::vector<int> ranks = Numbers(attributes, "ranks");
    std::vector<std::vector<int64_t>> shapes;
    std::vector<d5_tensor> described;
    for (const auto &shape : *inputs) {
        // Unknown so far: MXNet calls again.
        if (shape.empty() || std::count(shape.begin(), shape.end(), 0)) return MX_SUCCESS;
        shapes.emplace_back(shape.begin(), shape.end());
        described.push_back({nullptr, shapes.back().data(), ranks[described.size()], D5_FLOAT32});
    }
    const d5_call call = NewCall(described, outputs->size());
    for (int32_t i = 0; i < call.output_count; ++i) {
        int64_t shape[D5_MAX_RANK];
        int32_t rank = 0;
        if (!Check(d5_output_shape(&call, i, shape, &rank))) return MX_FAIL;
        (*outputs)[i].assign(shape, shape + rank);
        if (rank == 0) (*outputs)[i] = {1};
    }
    return MX_SUCCESS;
}

MXReturnValue Forward(const Attributes &attributes, Tensors *inputs, Tensors *outputs, const OpResource &) {
    const std::vector<int> ranks = Numbers(attributes, "ranks");
    const auto i = Describe(inputs->begin(), ranks.data(), inputs->size());
    const auto o = Describe(outputs->begin(), ranks.data() + i.size(), outputs->size());
    d5_call call = NewCall(i, o.size());
    call.outputs = o.data();
    return Check(d5_forward(&call));
}

// MXNet passes the outputs' gradients, the inputs and the outputs, in this order.
MXReturnValue Backward(const Attributes &attributes, Tensors *given, Tensors *gradients, const OpResource &) {
    if (d5_backward == nullptr) {
        // MXNet accepts only operators with a gradient into a graph, even if the gradient is never used.
        MX_ERROR_MSG << "custom operator " << d5_operator_name << " has no backward pass";
        return MX_FAIL;
    }
    const std::vector<int> ranks = Numbers(attributes, "ranks");
    const size_t inputs = gradients->size(), outputs = (given->size() - inputs) / 2;
    const auto h = Describe(given->begin(), ranks.data() + inputs, outputs);
    const auto i = Describe(given->begin() + outputs, ranks.data(), inputs);
    const auto o = Describe(given->begin() + outputs + inputs, ranks.data() + inputs, outputs);
    auto a = Describe(gradients->begin(), ranks.data(), inputs);
    for (d5_tensor &answer : a) {
        if (!IsFloating(answer.dtype)) answer.data = nullptr;
    }
    d5_call call = NewCall(i, outputs);
    call.outputs = o.data();
    call.output_gradients = h.data();
    call.input_gradients = a.data();
    return Check(d5_backward(&call));
}

}  // namespace

MXReturnValue initialize(int) { return MX_SUCCESS; }

const bool kRegistered = [] {
    Registry<CustomOp>::get()
        ->add(d5_operator_name)
        .setForward(Forward, "cpu")
        .setBackward(Backward, "cpu")
        .setParseAttrs(Count)
        .setInferType(InferType)
        .setInferShape(InferShape);
    return true;
}();
