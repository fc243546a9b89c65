// A custom operator as the TensorFlow operator d5_operator_name, and a second operator for its gradient. This file does
// not depend on the operator, because TensorFlow's headers are slow to compile. Runs on CUDA if D5_CUDA is defined, else
// on the CPU.
#ifdef D5_CUDA
#define EIGEN_USE_GPU
#endif

#include <string>
#include <vector>

#include "d5suite_glue.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

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

// A kernel's tensors, and their shapes.
struct Described {
    explicit Described(size_t count) : tensors(count), shapes(count) {}

    std::vector<d5_tensor> tensors;
    std::vector<Sizes> shapes;

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
        Described inputs(context->num_inputs()), outputs(context->num_outputs());
        for (int i = 0; i < context->num_inputs(); ++i) inputs.Set(i, context->input(i));
        d5_call call = NewCall(inputs.tensors, context->num_outputs(), Stream(context));
        for (int i = 0; i < context->num_outputs(); ++i) {
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
    const int input_count = context->num_inputs(), output_count = context->num_outputs();
    std::vector<d5_tensor> inputs(input_count);
    std::vector<Sizes> shapes(input_count);
    std::vector<tf::DataType> types;
    TF_RETURN_IF_ERROR(context->GetAttr("Tinputs", &types));
    for (int i = 0; i < output_count; ++i) context->set_output(i, context->UnknownShape());
    for (int i = 0; i < input_count; ++i) {
        if (!context->FullyDefined(context->input(i))) return tf::Status();
        const int32_t rank = context->Rank(context->input(i));
        for (int32_t k = 0; k < rank; ++k) shapes[i].push_back(context->Value(context->Dim(context->input(i), k)));
        inputs[i] = {nullptr, shapes[i].data(), rank, Dtype(types[i])};
    }
    d5_call call = NewCall(inputs, output_count);
    for (int i = 0; i < output_count; ++i) {
        int64_t sizes[D5_MAX_RANK];
        int32_t rank = 0;
        TF_RETURN_IF_ERROR(Answer(d5_output_shape(&call, i, sizes, &rank)));
        std::vector<DimensionHandle> dimensions;
        for (int32_t k = 0; k < rank; ++k) dimensions.push_back(context->MakeDim(sizes[k]));
        context->set_output(i, context->MakeShape(dimensions));
    }
    return tf::Status();
}

// Takes inputs, outputs and the outputs' gradients; returns the gradients of the floating-point inputs.
class Backward : public tf::OpKernel {
  public:
    explicit Backward(tf::OpKernelConstruction *context) : OpKernel(context) {
        std::vector<tf::DataType> inputs, outputs;  // GetAttr appends
        OP_REQUIRES_OK(context, context->GetAttr("Tinputs", &inputs));
        OP_REQUIRES_OK(context, context->GetAttr("Toutputs", &outputs));
        input_count_ = static_cast<int>(inputs.size());
        output_count_ = static_cast<int>(outputs.size());
    }

    void Compute(tf::OpKernelContext *context) override {
        Described inputs(input_count_), answers(input_count_), outputs(output_count_), heads(output_count_);
        for (int i = 0; i < output_count_; ++i) {
            outputs.Set(i, context->input(input_count_ + i));
            heads.Set(i, context->input(input_count_ + output_count_ + i));
        }
        int count = 0;
        for (int i = 0; i < input_count_; ++i) {
            const tf::Tensor &input = context->input(i);
            inputs.Set(i, input);
            answers.Set(i, input, nullptr);
            if (!tf::DataTypeIsFloating(input.dtype())) continue;
            tf::Tensor *answer = nullptr;
            OP_REQUIRES_OK(context, context->allocate_output(count++, input.shape(), &answer));
            answers.Set(i, *answer);
        }
        d5_call call = NewCall(inputs.tensors, output_count_, Stream(context));
        call.outputs = outputs.tensors.data();
        call.output_gradients = heads.tensors.data();
        call.input_gradients = answers.tensors.data();
        OP_REQUIRES_OK(context, Answer(d5_backward(&call)));
    }

  private:
    int input_count_ = 0, output_count_ = 0;
};

tf::Status GradientShapes(InferenceContext *context) {
    std::vector<tf::DataType> types;
    TF_RETURN_IF_ERROR(context->GetAttr("Tinputs", &types));
    int count = 0;
    for (int i = 0; i < static_cast<int>(types.size()); ++i) {
        if (tf::DataTypeIsFloating(types[i])) context->set_output(count++, context->input(i));
    }
    return tf::Status();
}

const std::string kBackward = std::string(d5_operator_name) + "Backward";

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

// Called only if the source has a backward pass.
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
