/* One operator as plain C functions, which d5suite makes a native operator of every framework.
 *
 * A source file includes this header and defines d5_forward, optionally d5_backward, and the shapes of the outputs:
 *
 *     #include "d5suite_operator.h"
 *     D5_OUTPUTS_LIKE_FIRST_INPUT
 *     extern "C" int d5_forward(const d5_call *call) { ... return D5_OK; }
 *     extern "C" int d5_backward(const d5_call *call) { ... return D5_OK; }
 *
 * All tensors are dense, in row-major order, with the framework's alignment. Do not write to inputs. Several threads may
 * call functions at the same time on different tensors, so functions must keep no state. A function that cannot do its
 * work returns a D5_ code other than D5_OK; the framework then raises an error with the function's name.
 *
 * A CUDA source (.cu) has the same functions; data pointers then point to device memory. Launch kernels on `stream`.
 */
#ifndef D5SUITE_OPERATOR_H
#define D5SUITE_OPERATOR_H

#include <stdint.h>

#define D5_OK 0
#define D5_UNSUPPORTED_DTYPE 1
#define D5_UNSUPPORTED_SHAPE 2
#define D5_FAILED 3

#define D5_MAX_RANK 8

/* Types of elements, with the numbers of ONNX's TensorProto.DataType. */
enum d5_dtype {
    D5_FLOAT32 = 1, D5_UINT8 = 2, D5_INT8 = 3, D5_INT32 = 6, D5_INT64 = 7, D5_BOOL = 9, D5_FLOAT16 = 10,
    D5_FLOAT64 = 11, D5_BFLOAT16 = 16
};

typedef struct {
    void *data;
    const int64_t *shape;
    int32_t rank;
    int32_t dtype;
} d5_tensor;

typedef struct {
    const char *name;
    const double *values; /* one value for a number, several for a list */
    int32_t count;
} d5_attribute;

typedef struct {
    const d5_tensor *inputs;
    const d5_tensor *outputs;          /* forward: to be written; backward: what forward wrote */
    const d5_tensor *output_gradients; /* backward only, one per output */
    const d5_tensor *input_gradients;  /* backward only, one per input, to be written; data is NULL if not wanted */
    const d5_attribute *attributes;
    int32_t input_count;
    int32_t output_count;
    int32_t attribute_count;
    void *stream; /* cudaStream_t on a GPU, otherwise NULL */
} d5_call;

#ifdef __cplusplus
extern "C" {
#endif

/* Write the outputs. */
int d5_forward(const d5_call *call);

/* Write the gradients of the inputs. */
int d5_backward(const d5_call *call);

/* Write the shape (room for D5_MAX_RANK sizes) and the rank of one output, given the inputs' shapes; data is NULL. */
int d5_output_shape(const d5_call *call, int32_t output, int64_t *shape, int32_t *rank);

#ifdef __cplusplus
}
#endif

/* For operators whose outputs all have the shape of the first input. */
#define D5_OUTPUTS_LIKE_FIRST_INPUT                                                                                  \
    extern "C" int d5_output_shape(const d5_call *call, int32_t, int64_t *shape, int32_t *rank) {                    \
        *rank = call->inputs[0].rank;                                                                                \
        for (int32_t i = 0; i < *rank; ++i) shape[i] = call->inputs[0].shape[i];                                     \
        return D5_OK;                                                                                                \
    }

static inline int64_t d5_size(const d5_tensor *tensor) {
    int64_t size = 1;
    for (int32_t i = 0; i < tensor->rank; ++i) size *= tensor->shape[i];
    return size;
}

#endif
