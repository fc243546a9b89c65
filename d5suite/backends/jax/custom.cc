// A custom operator as two handlers of XLA's foreign function interface. This file does not depend on the operator,
// because XLA's headers are slow to compile: the caller of the second handler passes the number of `inputs`. D5_CUDA
// builds it for CUDA, D5_PYTHON for Python functions.
#include <cstdint>
#include <string>
#include <vector>

#include "d5suite_glue.h"
#include "xla/ffi/api/ffi.h"

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

// Describes `count` consecutive arguments.
std::vector<d5_tensor> Arguments(const ffi::RemainingArgs &arguments, size_t first, size_t count) {
    std::vector<d5_tensor> described(count);
    for (size_t i = 0; i < count; ++i) described[i] = Describe(*arguments.get<ffi::AnyBuffer>(first + i));
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
    const auto inputs = Arguments(arguments, 0, arguments.size());
    std::vector<d5_tensor> outputs(results.size());
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i] = Describe(**results.get<ffi::AnyBuffer>(i));
    d5_call call = NewCall(inputs, outputs.size(), stream);
    call.outputs = outputs.data();
    return Answer(d5_forward(&call));
}

bool IsFloating(int32_t dtype) {
    return dtype == D5_FLOAT32 || dtype == D5_FLOAT64 || dtype == D5_FLOAT16 || dtype == D5_BFLOAT16;
}

// Maps inputs, outputs and the outputs' gradients to the gradients of the floating-point inputs.
ffi::Error Backward(void *stream, ffi::RemainingArgs arguments, ffi::RemainingRets results, int64_t input_count) {
    const size_t given = arguments.size(), first = static_cast<size_t>(input_count), output_count = (given - first) / 2;
    if (first > given || first + 2 * output_count != given) return Mismatch();
    const auto inputs = Arguments(arguments, 0, first);
    const auto outputs = Arguments(arguments, first, output_count);
    const auto heads = Arguments(arguments, first + output_count, output_count);
    std::vector<d5_tensor> answers = inputs;
    size_t count = 0;
    for (d5_tensor &answer : answers) {
        answer.data = nullptr;
        if (!IsFloating(answer.dtype)) continue;
        if (count == results.size()) return Mismatch();
        answer = Describe(**results.get<ffi::AnyBuffer>(count++));
    }
    if (count != results.size()) return Mismatch();
    d5_call call = NewCall(inputs, output_count, stream);
    call.outputs = outputs.data();
    call.output_gradients = heads.data();
    call.input_gradients = answers.data();
    return Answer(d5_backward(&call));
}

#ifdef D5_CUDA
auto Bind() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void *>>().RemainingArgs().RemainingRets(); }
#define D5_HANDLER(function) function
#elif defined(D5_PYTHON)
// The stream argument carries the address of the function to call.
auto Bind() { return ffi::Ffi::Bind().Attr<uint64_t>("function").RemainingArgs().RemainingRets(); }
#define D5_HANDLER(function) \
    [](uint64_t address, auto... given) { return function(reinterpret_cast<void *>(address), given...); }
#else
auto Bind() { return ffi::Ffi::Bind().RemainingArgs().RemainingRets(); }
#define D5_HANDLER(function) [](auto... given) { return function(nullptr, given...); }
#endif

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(D5Forward, D5_HANDLER(Forward), Bind());
XLA_FFI_DEFINE_HANDLER_SYMBOL(D5Backward, D5_HANDLER(Backward), Bind().Attr<int64_t>("inputs"));
