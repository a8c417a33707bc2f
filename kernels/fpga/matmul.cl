// Matrix products on FPGAs: C = alpha * A B + beta * bias, batched, any strides. C is [batches][rows][cols].

#define OPERANDS                                                                                               \
  __global const float* restrict a, const int a_offset, const int a_batch, const int a_row, const int a_k,     \
      __global const float* restrict b, const int b_offset, const int b_batch, const int b_k, const int b_col
#define SCALING                                                                                    \
  const float alpha, const float beta, __global const float* restrict bias, const int bias_offset, \
      const int bias_batch, const int bias_row, const int bias_col

#define K_PLACE(k) (int4)((k) * a_k, (k) * b_k, 0, 0)
#define COL_PLACE(col) (int4)((col) * b_col, 0, 0, 0)
#define A(row, k) a[a_offset + batch * a_batch + (row) * a_row + (k).x]
#define B(k, col) b[b_offset + batch * b_batch + (k).y + (col).x]
#define A_ALONG_K (a_k == 1)
#define B_ALONG_K (b_k == 1)
#define FINISH(row, col, sum)                                                                      \
  float scaled = alpha * (sum);                                                                    \
  if (beta != 0.0f)                                                                                \
    scaled = fma(beta, bias[bias_offset + batch * bias_batch + (row) * bias_row + (col) * bias_col], scaled); \
  KEEP((batch * rows + (row)) * cols + (col), scaled);

#ifdef CHANNELS
SINGLE __kernel void matmul_load(OPERANDS, PROBLEM) { LOADS }
SINGLE __kernel void matmul_store(PROBLEM, SCALING, RESULTS) { STORES }
#else
SINGLE __kernel void matmul(OPERANDS, PROBLEM, SCALING, RESULTS) { WHOLE }
#endif
