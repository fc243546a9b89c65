// y = GELU(x + bias), bias along the last axis, for GPUs; see bias_gelu.cc.
#include <cuda_runtime.h>

#include "d5suite_operator.h"

D5_OUTPUTS_LIKE_FIRST_INPUT

namespace {

constexpr int kThreads = 256;

template <typename T>
__device__ T Slope(T s) {
    return T(0.5) * (T(1) + erf(s * T(0.70710678118654752440))) +
           s * T(0.39894228040143267794) * exp(T(-0.5) * s * s);
}

template <typename T>
__global__ void Forward(const T *x, const T *bias, T *y, int64_t size, int64_t columns) {
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < size; i += int64_t(gridDim.x) * blockDim.x) {
        const T s = x[i] + bias[i % columns];
        y[i] = s * T(0.5) * (T(1) + erf(s * T(0.70710678118654752440)));
    }
}

// One block covers 32 columns by 8 rows: reads are coalesced, and each column's sum is deterministic.
template <typename T>
__global__ void Backward(const T *x, const T *bias, const T *dy, T *dx, T *dbias, int64_t rows, int64_t columns) {
    __shared__ double partial[8][32];
    const int64_t c = blockIdx.x * int64_t(32) + threadIdx.x;
    double sum = 0;
    if (c < columns) {
        for (int64_t r = threadIdx.y; r < rows; r += 8) {
            const int64_t i = r * columns + c;
            const T gradient = dy[i] * Slope(x[i] + bias[c]);
            if (dx) dx[i] = gradient;
            sum += gradient;
        }
    }
    partial[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && c < columns && dbias) {
        double total = 0;
        for (int k = 0; k < 8; ++k) total += partial[k][threadIdx.x];
        dbias[c] = T(total);
    }
}

template <typename T>
int LaunchForward(const d5_call *call) {
    const int64_t size = d5_size(&call->inputs[0]), columns = call->inputs[1].shape[0];
    const int64_t blocks = (size + kThreads - 1) / kThreads;
    Forward<T><<<static_cast<unsigned>(blocks < 65535 ? blocks : 65535), kThreads, 0,
                 static_cast<cudaStream_t>(call->stream)>>>(
        static_cast<const T *>(call->inputs[0].data), static_cast<const T *>(call->inputs[1].data),
        static_cast<T *>(call->outputs[0].data), size, columns);
    return cudaGetLastError() == cudaSuccess ? D5_OK : D5_FAILED;
}

template <typename T>
int LaunchBackward(const d5_call *call) {
    const int64_t columns = call->inputs[1].shape[0], rows = d5_size(&call->inputs[0]) / columns;
    Backward<T><<<static_cast<unsigned>((columns + 31) / 32), dim3(32, 8), 0,
                  static_cast<cudaStream_t>(call->stream)>>>(
        static_cast<const T *>(call->inputs[0].data), static_cast<const T *>(call->inputs[1].data),
        static_cast<const T *>(call->output_gradients[0].data), static_cast<T *>(call->input_gradients[0].data),
        static_cast<T *>(call->input_gradients[1].data), rows, columns);
    return cudaGetLastError() == cudaSuccess ? D5_OK : D5_FAILED;
}

}  // namespace

extern "C" int d5_forward(const d5_call *call) {
    if (call->inputs[0].dtype == D5_FLOAT32) return LaunchForward<float>(call);
    if (call->inputs[0].dtype == D5_FLOAT64) return LaunchForward<double>(call);
    return D5_UNSUPPORTED_DTYPE;
}

extern "C" int d5_backward(const d5_call *call) {
    if (call->inputs[0].dtype == D5_FLOAT32) return LaunchBackward<float>(call);
    if (call->inputs[0].dtype == D5_FLOAT64) return LaunchBackward<double>(call);
    return D5_UNSUPPORTED_DTYPE;
}
