// STREAM's triad (J. D. McCalpin, https://www.cs.virginia.edu/stream) and a sum, over doubles.
// Every thread repeats its own part without waiting for others, so that small arrays stay in the thread's cache.

#include <cstdint>
#include <omp.h>

namespace {
int64_t first_of(int64_t n, int64_t thread) { return n * thread / omp_get_num_threads(); }

void keep_memory() { asm volatile("" ::: "memory"); }  // so that the compiler removes no repetition
}  // namespace

extern "C" void d5_fill(double *__restrict a, int64_t n, int64_t period) {
#pragma omp parallel
  {
    const int64_t last = first_of(n, omp_get_thread_num() + 1);
    for (int64_t i = first_of(n, omp_get_thread_num()); i < last; ++i) a[i] = static_cast<double>(i % period);
  }
}

extern "C" void d5_triad(double *__restrict a, const double *__restrict b, const double *__restrict c, int64_t n,
                         int64_t repeats) {
#pragma omp parallel
  {
    const int64_t first = first_of(n, omp_get_thread_num()), last = first_of(n, omp_get_thread_num() + 1);
    for (int64_t r = 0; r < repeats; ++r) {
#pragma omp simd
      for (int64_t i = first; i < last; ++i) a[i] = b[i] + 3.0 * c[i];
      keep_memory();
    }
  }
}

extern "C" double d5_sum(const double *__restrict a, int64_t n, int64_t repeats) {
  double total = 0.0;
#pragma omp parallel reduction(+ : total)
  {
    const int64_t first = first_of(n, omp_get_thread_num()), last = first_of(n, omp_get_thread_num() + 1);
    for (int64_t r = 0; r < repeats; ++r) {
      double s0 = 0.0, s1 = 0.0, s2 = 0.0, s3 = 0.0;  // a single sum would wait for every addition
      const int64_t quarter = (last - first) / 4;
      const double *p = a + first;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
      for (int64_t i = 0; i < quarter; ++i) {
        s0 += p[i];
        s1 += p[quarter + i];
        s2 += p[2 * quarter + i];
        s3 += p[3 * quarter + i];
      }
      for (int64_t i = first + 4 * quarter; i < last; ++i) s0 += a[i];
      total = s0 + s1 + s2 + s3;
      keep_memory();
    }
  }
  return total;
}
