// A custom operator as two handlers of XLA's foreign function interface. D5_INPUTS and D5_OUTPUTS are its numbers of
// tensors; D5_CUDA builds it for CUDA, D5_PYTHON for Python functions.
#include <array>
#include <cstdint>
#include <string>

#include "d5suite_operator.h"
#include "xla/ffi/api/ffi.h"

extern "C" const d5_attribute d5_attributes[];
extern "C" const int32_t d5_attribute_count;
extern "C" const char d5_operator_name[];

namespace {

namespace ffi = xla::ffi;

// Returns 0 for a type that the C interface lacks; the operator then rejects it.
int32_t Dtype(ffi::DataType type) {
    switch (type) {
        case ffi::DataType::F32: return D5_FLOAT32;
        case ffi::DataType::F64: return D5_FLOAT64;
        case ffi::DataType::F16: return D5_FLOAT16;
        case ffi::DataType::BF16: return D5_BFLOAT16;
        case ffi::DataType::S64: return D5_INT64;
        case ffi::DataType::S32: return D5_INT32;
        case ffi::DataType::S8: return D5_INT8;
        case ffi::DataType::U8: return D5_UINT8;
        case ffi::DataType::PRED: return D5_BOOL;
        default: return 0;
    }
}

d5_tensor Describe(const ffi::AnyBuffer &buffer) {
    const auto shape = buffer.dimensions();
    return {buffer.untyped_data(), shape.begin(), static_cast<int32_t>(shape.size()), Dtype(buffer.element_type())};
}

// Describes N consecutive arguments.
template <size_t N>
std::array<d5_tensor, N> Arguments(const ffi::RemainingArgs &arguments, size_t first) {
    std::array<d5_tensor, N> described;
    for (size_t i = 0; i < N; ++i) described[i] = Describe(*arguments.get<ffi::AnyBuffer>(first + i));
    return described;
}

ffi::Error Answer(int code) {
    if (code == D5_OK) return ffi::Error::Success();
    return ffi::Error(ffi::ErrorCode::kInternal, std::string("custom operator ") + d5_operator_name +
                                                     " failed with code " + std::to_string(code));
}

ffi::Error Mismatch() {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("custom operator ") + d5_operator_name +
                                                            " is called with the wrong number of tensors");
}

ffi::Error Forward(void *stream, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
    if (arguments.size() != D5_INPUTS || results.size() != D5_OUTPUTS) return Mismatch();
    const auto inputs = Arguments<D5_INPUTS>(arguments, 0);
    std::array<d5_tensor, D5_OUTPUTS> outputs;
    for (size_t i = 0; i < D5_OUTPUTS; ++i) outputs[i] = Describe(**results.get<ffi::AnyBuffer>(i));
    d5_call call = {};
    call.inputs = inputs.data();
    call.outputs = outputs.data();
    call.input_count = D5_INPUTS;
    call.output_count = D5_OUTPUTS;
    call.attributes = d5_attributes;
    call.attribute_count = d5_attribute_count;
    call.stream = stream;
    return Answer(d5_forward(&call));
}

#ifdef D5_HAS_BACKWARD
bool IsFloating(int32_t dtype) {
    return dtype == D5_FLOAT32 || dtype == D5_FLOAT64 || dtype == D5_FLOAT16 || dtype == D5_BFLOAT16;
}

// Maps inputs, outputs and the outputs' gradients to the gradients of the floating-point inputs.
ffi::Error Backward(void *stream, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
    if (arguments.size() != D5_INPUTS + 2 * D5_OUTPUTS) return Mismatch();
    const auto inputs = Arguments<D5_INPUTS>(arguments, 0);
    const auto outputs = Arguments<D5_OUTPUTS>(arguments, D5_INPUTS);
    const auto heads = Arguments<D5_OUTPUTS>(arguments, D5_INPUTS + D5_OUTPUTS);
    std::array<d5_tensor, D5_INPUTS> answers;
    size_t count = 0;
    for (size_t i = 0; i < D5_INPUTS; ++i) {
        answers[i] = inputs[i];
        answers[i].data = nullptr;
        if (!IsFloating(inputs[i].dtype)) continue;
        if (count == results.size()) return Mismatch();
        answers[i] = Describe(**results.get<ffi::AnyBuffer>(count++));
    }
    if (count != results.size()) return Mismatch();
    d5_call call = {};
    call.inputs = inputs.data();
    call.outputs = outputs.data();
    call.output_gradients = heads.data();
    call.input_gradients = answers.data();
    call.input_count = D5_INPUTS;
    call.output_count = D5_OUTPUTS;
    call.attributes = d5_attributes;
    call.attribute_count = d5_attribute_count;
    call.stream = stream;
    return Answer(d5_backward(&call));
}
#endif

#ifdef D5_CUDA
auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void *>>().RemainingArgs().RemainingRets(); }
#define D5_HANDLER(function) function
#elif defined(D5_PYTHON)
// The stream argument carries the address of the function to call.
auto Bind() { return ffi::Ffi::Bind().Attr<uint64_t>("function").RemainingArgs().RemainingRets(); }
#define D5_HANDLER(function)                                                                 \
    [](uint64_t address, ffi::RemainingArgs arguments, ffi::RemainingRets results) {         \
        return function(reinterpret_cast<void *>(address), arguments, results);              \
    }
#else
auto Bind() { return ffi::Ffi::Bind().RemainingArgs().RemainingRets(); }
#define D5_HANDLER(function) \
    [](ffi::RemainingArgs arguments, ffi::RemainingRets results) { return function(nullptr, arguments, results); }
#endif

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(D5Forward, D5_HANDLER(Forward), Bind());
#ifdef D5_HAS_BACKWARD
XLA_FFI_DEFINE_HANDLER_SYMBOL(D5Backward, D5_HANDLER(Backward), Bind());
#endif
