// Products of matrices that are not packed: their rows may have any strides.
//
//   out (COUNT x COLS)  =  a (COUNT x depth)  b (depth x COLS)
//
// The sums stay in registers. Each COUNT has a function, since compilers unroll loops into registers only for literal bounds.
// Needs common.cl before it.

#define COLS 32
#define ROWS 12
#define FEW 4

#ifndef NARROW
#define MULTIPLY(name, COUNT)                                                                           \
  inline void name(__global const float* restrict a, const int a_stride, __global const float* restrict b, \
                   const int b_stride, const int depth, __global float* restrict out, const int out_stride,             \
                   const bool resume) {                                                                 \
    float16 lo[COUNT], hi[COUNT];                                                                       \
    _Pragma("unroll") for (int m = 0; m < COUNT; m++) {                                                 \
      lo[m] = resume ? vload16(0, out + m * out_stride) : (float16)(0.0f);                              \
      hi[m] = resume ? vload16(1, out + m * out_stride) : (float16)(0.0f);                              \
    }                                                                                                   \
    for (int k = 0; k < depth; k++) {                                                                   \
      const float16 b_lo = vload16(0, b), b_hi = vload16(1, b);                                         \
      _Pragma("unroll") for (int m = 0; m < COUNT; m++) {                                               \
        const float value = a[m * a_stride + k];                                                        \
        lo[m] = fma((float16)(value), b_lo, lo[m]);                                                     \
        hi[m] = fma((float16)(value), b_hi, hi[m]);                                                     \
      }                                                                                                 \
      b += b_stride;                                                                                    \
    }                                                                                                   \
    _Pragma("unroll") for (int m = 0; m < COUNT; m++) {                                                 \
      vstore16(lo[m], 0, out + m * out_stride);                                                         \
      vstore16(hi[m], 1, out + m * out_stride);                                                         \
    }                                                                                                   \
  }
MULTIPLY(multiply_few, FEW)
MULTIPLY(multiply_rows, ROWS)
#else
// Computes the product in parts, whose sums fit into 16 registers of 8 floats, as in matmul.cl.
#define MULTIPLY(name, COUNT)                                                                           \
  inline void name(__global const float* restrict a, const int a_stride, __global const float* restrict b, \
                   const int b_stride, const int depth, __global float* restrict out, const int out_stride,             \
                   const bool resume) {                                                                 \
    float16 sum[COUNT];                                                                                 \
    _Pragma("unroll") for (int m = 0; m < COUNT; m++)                                                   \
      sum[m] = resume ? vload16(0, out + m * out_stride) : (float16)(0.0f);                             \
    for (int k = 0; k < depth; k++) {                                                                   \
      const float16 columns = vload16(0, b);                                                            \
      _Pragma("unroll") for (int m = 0; m < COUNT; m++)                                                 \
        sum[m] = fma((float16)(a[m * a_stride + k]), columns, sum[m]);                                  \
      b += b_stride;                                                                                    \
    }                                                                                                   \
    _Pragma("unroll") for (int m = 0; m < COUNT; m++) vstore16(sum[m], 0, out + m * out_stride);        \
  }
MULTIPLY(multiply_part_4, FEW)
MULTIPLY(multiply_part_6, ROWS / 2)

inline void multiply_few(__global const float* a, const int a_stride, __global const float* b, const int b_stride,
                         const int depth, __global float* out, const int out_stride, const bool resume) {
  for (int n = 0; n < COLS; n += LANES) multiply_part_4(a, a_stride, b + n, b_stride, depth, out + n, out_stride, resume);
}
inline void multiply_rows(__global const float* a, const int a_stride, __global const float* b, const int b_stride,
                          const int depth, __global float* out, const int out_stride, const bool resume) {
  for (int row = 0; row < ROWS; row += ROWS / 2)
    for (int n = 0; n < COLS; n += LANES)
      multiply_part_6(a + row * a_stride, a_stride, b + n, b_stride, depth, out + row * out_stride + n, out_stride, resume);
}
#endif

// Computes COLS columns of `rows` rows, at least FEW rows; the last rows may overlap the previous ones. With `resume`, the sums
// are added to `out`, and `rows` is a multiple of FEW.
inline void multiply_panel(__global const float* a, const int a_stride, __global const float* b, const int b_stride,
                           const int rows, const int depth, __global float* out, const int out_stride, const bool resume) {
  int row = 0;
  for (; row + ROWS <= rows; row += ROWS)
    multiply_rows(a + row * a_stride, a_stride, b, b_stride, depth, out + row * out_stride, out_stride, resume);
  for (; row < rows; row += FEW) {
    const int first = min(row, rows - FEW);
    multiply_few(a + first * a_stride, a_stride, b, b_stride, depth, out + first * out_stride, out_stride, resume);
  }
}
