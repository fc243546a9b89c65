// A custom operator as the TensorFlow operator d5_operator_name, with D5_INPUTS inputs and D5_OUTPUTS outputs, and a
// second operator for its gradient. Runs on CUDA if D5_CUDA is defined, else on the CPU.
#ifdef D5_CUDA
#define EIGEN_USE_GPU
#endif

#include <array>
#include <string>
#include <vector>

#include "d5suite_operator.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

extern "C" const d5_attribute d5_attributes[];
extern "C" const int32_t d5_attribute_count;
extern "C" const char d5_operator_name[];

namespace {

namespace tf = tensorflow;
using tf::shape_inference::DimensionHandle;
using tf::shape_inference::InferenceContext;
using tf::shape_inference::ShapeHandle;

using Sizes = std::vector<int64_t>;

// Returns 0 for a type that the C interface lacks; the operator then rejects it.
int32_t Dtype(tf::DataType type) {
    switch (type) {
        case tf::DT_FLOAT: return D5_FLOAT32;
        case tf::DT_DOUBLE: return D5_FLOAT64;
        case tf::DT_HALF: return D5_FLOAT16;
        case tf::DT_BFLOAT16: return D5_BFLOAT16;
        case tf::DT_INT64: return D5_INT64;
        case tf::DT_INT32: return D5_INT32;
        case tf::DT_INT8: return D5_INT8;
        case tf::DT_UINT8: return D5_UINT8;
        case tf::DT_BOOL: return D5_BOOL;
        default: return 0;
    }
}

tf::Status Answer(int code) {
    if (code == D5_OK) return tf::Status();
    return tf::errors::Internal("custom operator ", d5_operator_name, " failed with code ", code);
}

d5_call NewCall() {
    d5_call call = {};
    call.input_count = D5_INPUTS;
    call.output_count = D5_OUTPUTS;
    call.attributes = d5_attributes;
    call.attribute_count = d5_attribute_count;
    return call;
}

// A kernel's tensors, and their shapes.
template <size_t N>
struct Described {
    std::array<d5_tensor, N> tensors;
    std::array<Sizes, N> shapes;

    void Set(size_t index, const tf::Tensor &tensor, void *data) {
        Sizes &sizes = shapes[index];
        sizes.clear();
        for (int i = 0; i < tensor.dims(); ++i) sizes.push_back(tensor.dim_size(i));
        tensors[index] = {data, sizes.data(), tensor.dims(), Dtype(tensor.dtype())};
    }

    void Set(size_t index, const tf::Tensor &tensor) { Set(index, tensor, tensor.data()); }
};

void *Stream(tf::OpKernelContext *context) {
#ifdef D5_CUDA
    return context->eigen_gpu_device().stream();
#else
    return nullptr;
#endif
}

class Forward : public tf::OpKernel {
  public:
    using OpKernel::OpKernel;

    void Compute(tf::OpKernelContext *context) override {
        Described<D5_INPUTS> inputs;
        for (int i = 0; i < D5_INPUTS; ++i) inputs.Set(i, context->input(i));
        d5_call call = NewCall();
        call.inputs = inputs.tensors.data();
        call.stream = Stream(context);
        Described<D5_OUTPUTS> outputs;
        for (int i = 0; i < D5_OUTPUTS; ++i) {
            int64_t sizes[D5_MAX_RANK];
            int32_t rank = 0;
            OP_REQUIRES_OK(context, Answer(d5_output_shape(&call, i, sizes, &rank)));
            tf::TensorShape shape;
            for (int32_t k = 0; k < rank; ++k) OP_REQUIRES_OK(context, shape.AddDimWithStatus(sizes[k]));
            tf::Tensor *output = nullptr;
            OP_REQUIRES_OK(context, context->allocate_output(i, shape, &output));
            outputs.Set(i, *output);
        }
        call.outputs = outputs.tensors.data();
        OP_REQUIRES_OK(context, Answer(d5_forward(&call)));
    }
};

tf::Status OutputShapes(InferenceContext *context) {
    std::array<d5_tensor, D5_INPUTS> inputs;
    std::array<Sizes, D5_INPUTS> shapes;
    std::vector<tf::DataType> types;
    TF_RETURN_IF_ERROR(context->GetAttr("Tinputs", &types));
    for (int i = 0; i < D5_OUTPUTS; ++i) context->set_output(i, context->UnknownShape());
    for (int i = 0; i < D5_INPUTS; ++i) {
        if (!context->FullyDefined(context->input(i))) return tf::Status();
        const int32_t rank = context->Rank(context->input(i));
        for (int32_t k = 0; k < rank; ++k) shapes[i].push_back(context->Value(context->Dim(context->input(i), k)));
        inputs[i] = {nullptr, shapes[i].data(), rank, Dtype(types[i])};
    }
    d5_call call = NewCall();
    call.inputs = inputs.data();
    for (int i = 0; i < D5_OUTPUTS; ++i) {
        int64_t sizes[D5_MAX_RANK];
        int32_t rank = 0;
        TF_RETURN_IF_ERROR(Answer(d5_output_shape(&call, i, sizes, &rank)));
        std::vector<DimensionHandle> dimensions;
        for (int32_t k = 0; k < rank; ++k) dimensions.push_back(context->MakeDim(sizes[k]));
        context->set_output(i, context->MakeShape(dimensions));
    }
    return tf::Status();
}

#ifdef D5_HAS_BACKWARD
// Takes inputs, outputs and the outputs' gradients; returns the gradients of the floating-point inputs.
class Backward : public tf::OpKernel {
  public:
    using OpKernel::OpKernel;

    void Compute(tf::OpKernelContext *context) override {
        Described<D5_INPUTS> inputs, answers;
        Described<D5_OUTPUTS> outputs, heads;
        for (int i = 0; i < D5_OUTPUTS; ++i) {
            outputs.Set(i, context->input(D5_INPUTS + i));
            heads.Set(i, context->input(D5_INPUTS + D5_OUTPUTS + i));
        }
        int count = 0;
        for (int i = 0; i < D5_INPUTS; ++i) {
            const tf::Tensor &input = context->input(i);
            inputs.Set(i, input);
            answers.Set(i, input, nullptr);
            if (!tf::DataTypeIsFloating(input.dtype())) continue;
            tf::Tensor *answer = nullptr;
            OP_REQUIRES_OK(context, context->allocate_output(count++, input.shape(), &answer));
            answers.Set(i, *answer);
        }
        d5_call call = NewCall();
        call.inputs = inputs.tensors.data();
        call.outputs = outputs.tensors.data();
        call.output_gradients = heads.tensors.data();
        call.input_gradients = answers.tensors.data();
        call.stream = Stream(context);
        OP_REQUIRES_OK(context, Answer(d5_backward(&call)));
    }
};

tf::Status GradientShapes(InferenceContext *context) {
    std::vector<tf::DataType> types;
    TF_RETURN_IF_ERROR(context->GetAttr("Tinputs", &types));
    int count = 0;
    for (int i = 0; i < D5_INPUTS; ++i) {
        if (tf::DataTypeIsFloating(types[i])) context->set_output(count++, context->input(i));
    }
    return tf::Status();
}

const std::string kBackward = std::string(d5_operator_name) + "Backward";
#endif

}  // namespace

#ifdef D5_CUDA
#define D5_DEVICE tf::DEVICE_GPU
#else
#define D5_DEVICE tf::DEVICE_CPU
#endif

REGISTER_OP(d5_operator_name)
    .Input("inputs: Tinputs")
    .Output("outputs: Toutputs")
    .Attr("Tinputs: list(type) >= 1")
    .Attr("Toutputs: list(type) >= 1")
    .SetShapeFn(OutputShapes);
REGISTER_KERNEL_BUILDER(Name(d5_operator_name).Device(D5_DEVICE), Forward);

#ifdef D5_HAS_BACKWARD
REGISTER_OP(kBackward.c_str())
    .Input("inputs: Tinputs")
    .Input("outputs: Toutputs")
    .Input("output_gradients: Toutputs")
    .Output("input_gradients: Tgradients")
    .Attr("Tinputs: list(type) >= 1")
    .Attr("Toutputs: list(type) >= 1")
    .Attr("Tgradients: list(type)")
    .SetShapeFn(GradientShapes);
REGISTER_KERNEL_BUILDER(Name(kBackward.c_str()).Device(D5_DEVICE), Backward);
#endif
