/* The functions of BLAS that numpy calls for products of matrices, instead of OpenBLAS with its 30 MB of kernels.
 *
 * The image multiplies with numpy only for spectrograms and for scores of late interaction; models run in kernels/ and
 * torch. docker/prune.py compiles this file to a library with the name of numpy's, with the interface of CBLAS: 64-bit
 * integers, names between scipy_ and 64_. Functions of LAPACK, which nothing here calls, end the process with a message.
 */
#include <complex.h>
#include <stdint.h>
#include <stdlib.h>

#define CBLAS(name) scipy_cblas_##name##64_
#ifdef __x86_64__
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif

enum { COLUMNS = 102, TRANSPOSED = 112 };

/* gemm: C = alpha op(A) op(B) + beta C. With rows in order, column-major products are C' = op(B)' op(A)'. op(B) is copied
 * to rows of n values; the innermost loop then has no strides. */
#define DEFINE(T, prefix)                                                                                              \
    FAST static void prefix##_accumulate(int64_t n, T factor, const T *restrict x, T *restrict y) {                    \
        for (int64_t j = 0; j < n; j++)                                                                                \
            y[j] += factor * x[j];                                                                                     \
    }                                                                                                                  \
    static void prefix##_multiply(int order, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, T alpha,       \
                                  const T *a, int64_t lda, const T *b, int64_t ldb, T beta, T *c, int64_t ldc) {       \
        if (order == COLUMNS) {                                                                                        \
            prefix##_multiply(0, trans_b, trans_a, n, m, k, alpha, b, ldb, a, lda, beta, c, ldc);                      \
            return;                                                                                                    \
        }                                                                                                              \
        T *copy = 0;                                                                                                   \
        if (trans_b >= TRANSPOSED && n > 0 && k > 0) {                                                                 \
            copy = malloc((size_t)n * (size_t)k * sizeof(T));                                                          \
            if (!copy)                                                                                                 \
                abort();                                                                                               \
            for (int64_t j = 0; j < n; j++)                                                                            \
                for (int64_t p = 0; p < k; p++)                                                                        \
                    copy[p * n + j] = b[j * ldb + p];                                                                  \
            b = copy, ldb = n;                                                                                         \
        }                                                                                                              \
        for (int64_t i = 0; i < m; i++) {                                                                              \
            for (int64_t j = 0; j < n; j++)                                                                            \
                c[i * ldc + j] = beta == (T)0 ? (T)0 : beta * c[i * ldc + j];                                          \
            for (int64_t p = 0; p < k; p++)                                                                            \
                prefix##_accumulate(n, alpha *(trans_a >= TRANSPOSED ? a[p * lda + i] : a[i * lda + p]),               \
                                    b + p * ldb, c + i * ldc);                                                         \
        }                                                                                                              \
        free(copy);                                                                                                    \
    }                                                                                                                  \
    FAST static T prefix##_inner(int64_t n, const T *x, int64_t step_x, const T *y, int64_t step_y) {                  \
        T sum = 0;                                                                                                     \
        if (step_x == 1 && step_y == 1)                                                                                \
            for (int64_t i = 0; i < n; i++)                                                                            \
                sum += x[i] * y[i];                                                                                    \
        else                                                                                                           \
            for (int64_t i = 0; i < n; i++)                                                                            \
                sum += x[i * step_x] * y[i * step_y];                                                                  \
        return sum;                                                                                                    \
    }                                                                                                                  \
    static void prefix##_apply(int order, int trans, int64_t m, int64_t n, T alpha, const T *a, int64_t lda,           \
                               const T *x, int64_t step_x, T beta, T *y, int64_t step_y) {                             \
        int by_column = (order == COLUMNS) != (trans >= TRANSPOSED);                                                   \
        int64_t rows = trans >= TRANSPOSED ? n : m, inner = trans >= TRANSPOSED ? m : n;                               \
        for (int64_t i = 0; i < rows; i++) {                                                                           \
            T sum = by_column ? prefix##_inner(inner, a + i, lda, x, step_x)                                           \
                              : prefix##_inner(inner, a + i * lda, 1, x, step_x);                                      \
            y[i * step_y] = alpha * sum + (beta == (T)0 ? (T)0 : beta * y[i * step_y]);                                \
        }                                                                                                              \
    }

/* REAL takes factors as values, COMPLEX as addresses. */
#define EXPORT(T, prefix, FACTOR, VALUE)                                                                               \
    void CBLAS(prefix##gemm)(int order, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, FACTOR alpha,       \
                             const T *a, int64_t lda, const T *b, int64_t ldb, FACTOR beta, T *c, int64_t ldc) {       \
        prefix##_multiply(order, trans_a, trans_b, m, n, k, VALUE alpha, a, lda, b, ldb, VALUE beta, c, ldc);          \
    }                                                                                                                  \
    void CBLAS(prefix##syrk)(int order, int uplo, int trans, int64_t n, int64_t k, FACTOR alpha, const T *a,           \
                             int64_t lda, FACTOR beta, T *c, int64_t ldc) {                                            \
        (void)uplo; /* both triangles are computed */                                                                  \
        int other = trans >= TRANSPOSED ? TRANSPOSED - 1 : TRANSPOSED;                                                 \
        prefix##_multiply(order, trans, other, n, n, k, VALUE alpha, a, lda, a, lda, VALUE beta, c, ldc);              \
    }                                                                                                                  \
    void CBLAS(prefix##gemv)(int order, int trans, int64_t m, int64_t n, FACTOR alpha, const T *a, int64_t lda,        \
                             const T *x, int64_t step_x, FACTOR beta, T *y, int64_t step_y) {                          \
        prefix##_apply(order, trans, m, n, VALUE alpha, a, lda, x, step_x, VALUE beta, y, step_y);                     \
    }                                                                                                                  \
    void CBLAS(prefix##axpy)(int64_t n, FACTOR alpha, const T *x, int64_t step_x, T *y, int64_t step_y) {              \
        for (int64_t i = 0; i < n; i++)                                                                                \
            y[i * step_y] += (VALUE alpha) * x[i * step_x];                                                            \
    }

#define REAL(T, prefix)                                                                                                \
    DEFINE(T, prefix)                                                                                                  \
    EXPORT(T, prefix, T, )                                                                                             \
    T CBLAS(prefix##dot)(int64_t n, const T *x, int64_t step_x, const T *y, int64_t step_y) {                          \
        return prefix##_inner(n, x, step_x, y, step_y);                                                                \
    }

#define COMPLEX(T, prefix)                                                                                             \
    DEFINE(T, prefix)                                                                                                  \
    EXPORT(T, prefix, const T *, *)                                                                                    \
    void CBLAS(prefix##dotu_sub)(int64_t n, const T *x, int64_t step_x, const T *y, int64_t step_y, T *result) {       \
        *result = prefix##_inner(n, x, step_x, y, step_y);                                                             \
    }                                                                                                                  \
    void CBLAS(prefix##dotc_sub)(int64_t n, const T *x, int64_t step_x, const T *y, int64_t step_y, T *result) {       \
        T sum = 0;                                                                                                     \
        for (int64_t i = 0; i < n; i++)                                                                                \
            sum += conj(x[i * step_x]) * y[i * step_y];                                                                \
        *result = sum;                                                                                                 \
    }

REAL(float, s)
REAL(double, d)
COMPLEX(float complex, c)
COMPLEX(double complex, z)
