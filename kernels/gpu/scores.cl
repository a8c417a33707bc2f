// Attention on GPUs, with memory linear in the length: the parts for forward and backward. Needs tile.cl before it.
//
//   query   [heads][L][depth]     out     [heads][L][width]      heads: `outer` x `inner` matrices
//   key     [heads][S][depth]     value   [heads][S][width]      L = queries, S = keys
//   lse     [heads][L]            logarithm of each row's sum of exponentials
//
// `out` and the gradients are [outer][rows][inner][columns]: the heads of one row side by side.
//
// A work-group computes TILE rows and SPAN columns of one result, and walks over the other sequence TILE rows at a time. It
// multiplies tiles of scores as tile.cl does, turns them into weights, and keeps the weights in local memory for the second
// product. So no two work-groups add to the same element, and the order of all sums is fixed. If a result has more than SPAN
// columns, further work-groups compute the same scores again.
//
// ITEM is 4. global size: blocks of rows (times GROUP), heads (times GROUP), blocks of SPAN columns

// Parameters of a batch of matrices.
#define MATRIX(x)                                                                           \
  __global const float *x, const int x##_offset, const int x##_outer, const int x##_inner, \
      const int x##_row, const int x##_col
#define SIZES                                                                                                  \
  const int depth, const int width, const int inner, const int queries, const int keys, const int causal,      \
      const float scale
#define HEAD_PLACES                                                                             \
  const int head = get_group_id(1), outer = head / inner, within = head % inner;                \
  const int span0 = (int)get_group_id(2) * SPAN
// In causal attention the last queries read most keys, so they begin first.
#define FROM_LAST ((int)get_num_groups(0) - 1 - (int)get_group_id(0))
#define HEAD(x) (x + x##_offset + outer * x##_outer + within * x##_inner)

#if SPAN == 2 * GROUP
#define WIDE 2
typedef float2 Wide;
#else
#define WIDE 4
typedef float4 Wide;
#endif
#define WIDES (SPAN / GROUP / WIDE)
#define SPAN_STRIDE (SPAN + 4)

// `tiles` also has DEPTH rows of the second product's right operand.
#define LOCALS                                                                                       \
  __local float4 tiles[(STEP_SIZE > DEPTH * SPAN_STRIDE ? STEP_SIZE : DEPTH * SPAN_STRIDE) / 4];     \
  __local float4 weights[TILE * STRIDE / 4];                                                         \
  Run sums[ITEM][RUNS]
#define CLEAR(result) \
  UNROLL for (int m = 0; m < ITEM; m++) UNROLL for (int n = 0; n < WIDES; n++) result[m][n] = (Wide)(0.0f)

#define LOAD_4(x, at, is_inside) ((is_inside) ? *(__global const float4*)(x + (at)) : (float4)(0.0f))
#define LOAD_1(x, at, is_inside) ((is_inside) ? x[at] : 0.0f)

// Rows and columns of this work-item within a tile of scores.
#define MY_ROW(m) TILE_ROW(m, DOWN)
#define MY_COL(n) (ACROSS * RUN + (n))

// Stores a tile of scores in local memory, columns first.
inline __attribute__((always_inline)) void put_weights(Run x[ITEM][RUNS], __local float* weights) {
  UNROLL for (int n = 0; n < RUN; n++) {
    const float4 column = (float4)(((float*)x[0])[n], ((float*)x[1])[n], ((float*)x[2])[n], ((float*)x[3])[n]);
    *(__local float4*)(weights + MY_COL(n) * STRIDE + MY_ROW(0)) = column;
  }
}

// Adds the product of the weights, turned, with up to TILE rows of x.
inline __attribute__((always_inline)) void add_rows(__local const float* weights, __local float* tile,
                                                    __global const float* x, const int row_stride, const int col_stride,
                                                    const int rows, const int span0, const int cols,
                                                    Wide result[ITEM][WIDES]) {
  for (int first = 0; first < min(rows, TILE); first += DEPTH) {
    UNROLL for (int v = 0; v < (SPAN * DEPTH / A_WIDTH + ITEMS - 1) / ITEMS; v++) {
      const int k = VECTOR(v) / (SPAN / A_WIDTH), col = VECTOR(v) % (SPAN / A_WIDTH) * A_WIDTH;
      if (k < DEPTH)
        *(__local JOIN(Vector_, A_WIDTH)*)(tile + k * SPAN_STRIDE + col) = JOIN(LOAD_, A_WIDTH)(
            x, (first + k) * row_stride + (span0 + col) * col_stride, first + k < rows && span0 + col < cols);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    _Pragma("unroll 2") for (int k = 0; k < DEPTH; k++) {
      const float4 a = *(__local const float4*)(weights + (first + k) * STRIDE + MY_ROW(0));
      UNROLL for (int n = 0; n < WIDES; n++) {
        const Wide b = *(__local const Wide*)(tile + k * SPAN_STRIDE + (n * GROUP + ACROSS) * WIDE);
        result[0][n] = fma((Wide)(a.x), b, result[0][n]);
        result[1][n] = fma((Wide)(a.y), b, result[1][n]);
        result[2][n] = fma((Wide)(a.z), b, result[2][n]);
        result[3][n] = fma((Wide)(a.w), b, result[3][n]);
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }
}

// Stores rows of a result, which begins at `out`; row `m` is multiplied by worth[m].
inline __attribute__((always_inline)) void store_rows(Wide result[ITEM][WIDES], const float worth[ITEM],
                                                      __global float* out, const int row_stride, const int rows,
                                                      const int span0, const int cols) {
  UNROLL for (int m = 0; m < ITEM; m++) UNROLL for (int n = 0; n < WIDES; n++) UNROLL for (int i = 0; i < WIDE; i++) {
    const int col = span0 + (n * GROUP + ACROSS) * WIDE + i;
    if (MY_ROW(m) < rows && col < cols) out[MY_ROW(m) * row_stride + col] = ((float*)&result[m][n])[i] * worth[m];
  }
}
