// y = GELU(x + bias), bias along the last axis: fuses two memory passes of a transformer's
// feed-forward part into one.
#include <cmath>

#include "d5suite_operator.h"

D5_OUTPUTS_LIKE_FIRST_INPUT

namespace {

constexpr double kInvSqrt2 = 0.70710678118654752440;
constexpr double kInvSqrt2Pi = 0.39894228040143267794;

template <typename T>
void Forward(const d5_call *call) {
    const T *x = static_cast<const T *>(call->inputs[0].data);
    const T *bias = static_cast<const T *>(call->inputs[1].data);
    T *y = static_cast<T *>(call->outputs[0].data);
    const int64_t columns = call->inputs[1].shape[0], rows = d5_size(&call->inputs[0]) / columns;
#pragma omp parallel for
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            const T s = x[r * columns + c] + bias[c];
            y[r * columns + c] = s * T(0.5) * (T(1) + std::erf(s * T(kInvSqrt2)));
        }
    }
}

template <typename T>
void Backward(const d5_call *call) {
    const T *x = static_cast<const T *>(call->inputs[0].data);
    const T *bias = static_cast<const T *>(call->inputs[1].data);
    const T *dy = static_cast<const T *>(call->output_gradients[0].data);
    T *dx = static_cast<T *>(call->input_gradients[0].data);
    T *dbias = static_cast<T *>(call->input_gradients[1].data);
    const int64_t columns = call->inputs[1].shape[0], rows = d5_size(&call->inputs[0]) / columns;
    // Each thread owns whole columns, so the sums need no synchronisation and are deterministic.
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < columns; block += 64) {
        const int64_t end = block + 64 < columns ? block + 64 : columns;
        double sums[64] = {0};
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t c = block; c < end; ++c) {
                const T s = x[r * columns + c] + bias[c];
                const T slope = T(0.5) * (T(1) + std::erf(s * T(kInvSqrt2))) +
                                s * T(kInvSqrt2Pi) * std::exp(T(-0.5) * s * s);
                const T gradient = dy[r * columns + c] * slope;
                if (dx) dx[r * columns + c] = gradient;
                sums[c - block] += gradient;
            }
        }
        if (dbias) {
            for (int64_t c = block; c < end; ++c) dbias[c] = T(sums[c - block]);
        }
    }
}

}  // namespace

extern "C" int d5_forward(const d5_call *call) {
    if (call->inputs[0].dtype == D5_FLOAT32) Forward<float>(call);
    else if (call->inputs[0].dtype == D5_FLOAT64) Forward<double>(call);
    else return D5_UNSUPPORTED_DTYPE;
    return D5_OK;
}

extern "C" int d5_backward(const d5_call *call) {
    if (call->inputs[0].dtype == D5_FLOAT32) Backward<float>(call);
    else if (call->inputs[0].dtype == D5_FLOAT64) Backward<double>(call);
    else return D5_UNSUPPORTED_DTYPE;
    return D5_OK;
}
