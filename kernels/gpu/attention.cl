// The forward of attention on GPUs; see scores.cl. Needs exp.cl before it.
//
// Softmax over blocks of keys with a running maximum (Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018).

#define LOAD_ROW(x, line, k, is_inside) JOIN(LOAD_, A_WIDTH)(x, (line) * x##_row + (k) * x##_col, is_inside)
#define LOAD_QUERY(line, k, exists) LOAD_ROW(query, query0 + (line), k, (exists) && query0 + (line) < queries)
#define LOAD_KEY(line, k, exists) LOAD_ROW(key, key0 + (line), k, (exists) && key0 + (line) < keys)

// Combines one number of each work-item of a row, in order. Needs `weights` free, and leaves it free.
#define COMBINE(numbers, start, combine)                                                                  \
  UNROLL for (int m = 0; m < ITEM; m++)                                                                   \
    ((__local float*)weights)[MY_ROW(m) * (GROUP + 1) + ACROSS] = numbers[m];                             \
  barrier(CLK_LOCAL_MEM_FENCE);                                                                           \
  UNROLL for (int m = 0; m < ITEM; m++) {                                                                 \
    numbers[m] = start;                                                                                   \
    _Pragma("unroll 2") for (int i = 0; i < GROUP; i++)                                                                       \
      numbers[m] = combine(numbers[m], ((__local float*)weights)[MY_ROW(m) * (GROUP + 1) + i]);           \
  }                                                                                                       \
  barrier(CLK_LOCAL_MEM_FENCE)
#define PLUS(a, b) ((a) + (b))

WORK_GROUP __kernel void attention(MATRIX(query), MATRIX(key), MATRIX(value), SIZES, __global float* out,
                                   __global float* lse) {
  LOCALS;
  HEAD_PLACES;
  const int query0 = FROM_LAST * TILE, end = causal ? min(keys, query0 + TILE) : keys;
  Wide result[ITEM][WIDES];
  float top[ITEM], total[ITEM], largest[ITEM];
  query = HEAD(query);
  key = HEAD(key);
  value = HEAD(value);
  CLEAR(result);
  UNROLL for (int m = 0; m < ITEM; m++) {
    top[m] = -INFINITY;
    total[m] = 0.0f;
  }
  for (int key0 = 0; key0 < end; key0 += TILE) {
    MULTIPLY(LOAD_QUERY, LOAD_KEY, 0, depth)
    UNROLL for (int m = 0; m < ITEM; m++) {
      largest[m] = top[m];
      UNROLL for (int n = 0; n < RUN; n++) {
        float* score = (float*)sums[m] + n;
        *score = key0 + MY_COL(n) < keys && (!causal || key0 + MY_COL(n) <= query0 + MY_ROW(m)) ? *score * scale : -INFINITY;
        largest[m] = max(largest[m], *score);
      }
    }
    COMBINE(largest, -INFINITY, max);
    UNROLL for (int m = 0; m < ITEM; m++) {
      const float worth = exact_exp(top[m] - largest[m]);
      top[m] = largest[m];
      total[m] *= worth;
      UNROLL for (int n = 0; n < WIDES; n++) result[m][n] *= worth;
      UNROLL for (int n = 0; n < RUN; n++) {
        float* score = (float*)sums[m] + n;
        *score = exact_exp(*score - largest[m]);
        total[m] += *score;
      }
    }
    put_weights(sums, (__local float*)weights);
    add_rows((__local float*)weights, (__local float*)tiles, value + key0 * value_row, value_row, value_col, keys - key0,
             span0, width, result);
  }
  COMBINE(total, 0.0f, PLUS);
  UNROLL for (int m = 0; m < ITEM; m++) {
    if (ACROSS == 0 && span0 == 0 && query0 + MY_ROW(m) < queries)
      lse[head * queries + query0 + MY_ROW(m)] = top[m] + log(total[m]);
    total[m] = 1.0f / total[m];
  }
  store_rows(result, total, out + ((outer * queries + query0) * inner + within) * width, inner * width, queries - query0, span0,
             width);
}
