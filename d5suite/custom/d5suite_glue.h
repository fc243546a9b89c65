// What the code of every framework around a custom operator shares: the operator's symbols, and how a call begins.
// The operator's source is compiled apart, with its name and attributes. Needs C++17.
#ifndef D5SUITE_GLUE_H
#define D5SUITE_GLUE_H

#include <cstdint>
#include <vector>

#include "d5suite_operator.h"

extern "C" const char d5_operator_name[];
extern "C" const d5_attribute d5_attributes[];
extern "C" const int32_t d5_attribute_count;

// Null if the source has none. Hidden, so that it never resolves to another library's symbol.
extern "C" int d5_backward(const d5_call *) __attribute__((weak, visibility("hidden")));

// The caller sets outputs and gradients. `stream` is null on the CPU. Static, so that no library calls another one's,
// with the attributes of another operator.
static inline d5_call NewCall(const std::vector<d5_tensor> &inputs, size_t outputs, void *stream = nullptr) {
    d5_call call = {};
    call.inputs = inputs.data();
    call.input_count = static_cast<int32_t>(inputs.size());
    call.output_count = static_cast<int32_t>(outputs);
    call.attributes = d5_attributes;
    call.attribute_count = d5_attribute_count;
    call.stream = stream;
    return call;
}

#endif
