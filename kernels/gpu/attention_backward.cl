// The backward of attention on GPUs; see scores.cl. Needs exp.cl before it.
//
//   shift  [heads][L]  sum over the columns of out times its gradient
//
// Dao, "FlashAttention-2" (2023), section 3.1, but with a launch for each gradient, so that the kernel needs few registers.

// The numbers of a score's query and key; rows of a tile are queries with QUERY_ROWS, else keys.
#ifdef QUERY_ROWS
#define QUERY(m, n) (row0 + MY_ROW(m))
#define KEY(m, n) (col0 + MY_COL(n))
#else
#define QUERY(m, n) (col0 + MY_COL(n))
#define KEY(m, n) (row0 + MY_ROW(m))
#endif
#define WEIGHT(score, query, key) \
  ((query) < queries && (key) < keys && (!causal || (key) <= (query)) ? exact_exp((score) * scale - lse[query]) : 0.0f)
#define GRADIENT(weight, product, query) ((query) < queries ? (weight) * ((product) - shift[query]) * scale : 0.0f)
#define LOAD_MINE(line, k, exists) \
  JOIN(LOAD_, A_WIDTH)(a, (row0 + (line)) * a_row + (k) * a_col, (exists) && row0 + (line) < rows)
#define LOAD_OTHER(line, k, exists) \
  JOIN(LOAD_, A_WIDTH)(b, (col0 + (line)) * b_row + (k) * b_col, (exists) && col0 + (line) < cols)

// The gradient of `mine`: of the queries with QUERY_ROWS, of the keys with KEY_ROWS. `other` are the keys or the queries, and
// the values are value and grad in the same order. With OF_VALUES `mine` are keys, and the gradient is that of their values.
WORK_GROUP __kernel void attention_backward(MATRIX(mine), MATRIX(other), MATRIX(mine_value), MATRIX(other_value),
                                            SIZES, __global const float* lse, __global const float* shift,
                                            __global float* gradient) {
  LOCALS;
  HEAD_PLACES;
#ifdef QUERY_ROWS
  const int rows = queries, cols = keys, row0 = FROM_LAST * TILE, first = 0, last = causal ? min(keys, row0 + TILE) : keys;
#else
  const int rows = keys, cols = queries, row0 = (int)get_group_id(0) * TILE, first = causal ? row0 : 0, last = queries;
#endif
#ifdef OF_VALUES
  const int products = 1, size = width, next_row = other_value_row, next_col = other_value_col;
  __global const float* next = HEAD(other_value);
#else
  const int products = 2, size = depth, next_row = other_row, next_col = other_col;
  __global const float* next = HEAD(other);
#endif
  Wide result[ITEM][WIDES];
  Run shares[ITEM][RUNS];
  const float ones[ITEM] = {1.0f, 1.0f, 1.0f, 1.0f};
  lse += head * queries;
  shift += head * queries;
  CLEAR(result);
  for (int col0 = first; col0 < last; col0 += TILE) {
    // First the scores, then the gradients of the weights. One loop, so that the code of a product exists once.
    _Pragma("unroll 1") for (int product = 0; product < products; product++) {
      __global const float* a = product == 0 ? HEAD(mine) : HEAD(mine_value);
      __global const float* b = product == 0 ? HEAD(other) : HEAD(other_value);
      const int a_row = product == 0 ? mine_row : mine_value_row, a_col = product == 0 ? mine_col : mine_value_col;
      const int b_row = product == 0 ? other_row : other_value_row, b_col = product == 0 ? other_col : other_value_col;
      MULTIPLY(LOAD_MINE, LOAD_OTHER, 0, product == 0 ? depth : width)
      UNROLL for (int m = 0; m < ITEM; m++) UNROLL for (int n = 0; n < RUN; n++) {
        float* share = (float*)shares[m] + n;
        const float sum = ((float*)sums[m])[n];
        *share = product == 0 ? WEIGHT(sum, QUERY(m, n), KEY(m, n)) : GRADIENT(*share, sum, QUERY(m, n));
      }
    }
    put_weights(shares, (__local float*)weights);
    add_rows((__local float*)weights, (__local float*)tiles, next + col0 * next_row, next_row, next_col, cols - col0,
             span0, size, result);
  }
  store_rows(result, ones, gradient + ((outer * rows + row0) * inner + within) * size, inner * size, rows - row0, span0,
             size);
}
