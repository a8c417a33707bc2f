// Attention on CPUs, forward and backward, with memory linear in the length. Needs common.cl before it.
//
//   query   [heads][L][depth]     out     [heads][L][width]      heads: `outer` x `inner` matrices
//   key     [heads][S][depth]     value   [heads][S][width]      L = queries, S = keys
//   lse     [heads][L]            logarithm of each row's sum of exponentials
//
// `out` and the gradients are [outer][rows][inner][columns]: the heads of one row side by side.
//
// A work-item copies BLOCK queries and BLOCK keys at a time into private matrices with rows of SPAN floats, padded with
// zeros. BLOCK and SPAN are options, multiples of LANES. All products multiply such matrices, in tiles of LANES x LANES.
// In the matrix of scores, a row has BLOCK queries for one key, so that the softmax over keys does the same in every lane.
// Causal attention skips tiles above the diagonal.
//
// Forward: softmax over blocks of keys with a running maximum (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018). Backward: Dao, "FlashAttention-2" (2023), algorithm 2, a head at a time.

// Parameters of a batch of matrices.
#define MATRIX(x)                                                                                    \
  __global const float *restrict x, const int x##_offset, const int x##_outer, const int x##_inner, \
      const int x##_row, const int x##_col
#define HEAD(x) (x + x##_offset + outer * x##_outer + within * x##_inner)
#define ALIGNED __attribute__((aligned(64)))
// LANES floats of a row of a private matrix. (PoCL compiles vstore16 to three stores, and a load waits for all of them.)
#define AT(p) (*(float16*)(p))
#define FILLED(n) (((n) + LANES - 1) / LANES * LANES)
#ifndef NARROW
#define PART LANES
#else
#define PART 4  // rows of 16 sums: half of 16 registers of 8 floats
#endif

// A tile of out, (+)= a b over `steps` of depth. The function is long, so it is not inlined at its calls.
#define PRODUCT(name, A_STEP, A_ROW, B_ROW, OUT_ROW)                                                              \
  __attribute__((noinline)) void name(const float* a, const float* b, const int steps, const int fresh, float* out) { \
    for (int part = 0; part < LANES; part += PART) {                                                              \
      float16 sums[PART];                                                                                         \
      _Pragma("unroll") for (int m = 0; m < PART; m++)                                                            \
        sums[m] = fresh ? (float16)(0.0f) : AT(out + (part + m) * OUT_ROW);                               \
      for (int k = 0; k < steps; k++) {                                                                           \
        const float16 row = AT(b + k * B_ROW);                                                            \
        _Pragma("unroll") for (int m = 0; m < PART; m++)                                                          \
          sums[m] = fma((float16)(a[k * A_STEP + (part + m) * A_ROW]), row, sums[m]);                             \
      }                                                                                                           \
      _Pragma("unroll") for (int m = 0; m < PART; m++) AT(out + (part + m) * OUT_ROW) = sums[m];          \
    }                                                                                                             \
  }
PRODUCT(score_tile, 1, SPAN, BLOCK, BLOCK)     // keys by queries: rows of keys, columns of turned queries
PRODUCT(query_tile, BLOCK, 1, SPAN, SPAN)      // queries by columns: scores are read along keys
PRODUCT(key_tile, 1, BLOCK, SPAN, SPAN)        // keys by columns: scores are read along queries

// 2^x to 2 ulp for x up to 127; 0 below -126. The polynomial is Cephes' exp2f.
inline float16 exp2_lanes(const float16 x) {
  const float16 shifted = x + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the nearest integer
  const float16 f = x - (shifted - 12582912.0f);
  float16 p = fma((float16)(1.535336188319500e-4f), f, (float16)(1.339887440266574e-3f));
  p = fma(p, f, (float16)(9.618437357674640e-3f));
  p = fma(p, f, (float16)(5.550332471162809e-2f));
  p = fma(p, f, (float16)(2.402264791363012e-1f));
  p = fma(p, f, (float16)(6.931472028550421e-1f));
  p = fma(p, f, (float16)(1.0f));
  return select(as_float16(as_int16(p) + (as_int16(shifted) << 23)), (float16)(0.0f), x < -126.0f);
}

// x, with -infinity in the lanes of queries that come `ahead` or more before a key.
inline float16 forbid_before(const float16 x, const int ahead) {
  const int16 lane = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return ahead <= 0 ? x : select((float16)(-INFINITY), x, lane >= ahead);
}

// Copies `rows` rows of x, with zeros up to a multiple of LANES in both directions.
inline void copy_rows(__global const float* x, const int stride_row, const int stride_col, const int rows,
                      const int cols, float* out) {
  for (int i = 0; i < FILLED(rows); i++)
    for (int c = 0; c < cols; c += LANES)
      AT(out + i * SPAN + c) =
          i < rows ? load_strided(x + i * stride_row + c * stride_col, stride_col, cols - c) : (float16)(0.0f);
}

// Transposes a result of `copy_rows`: `cols` rows of BLOCK.
inline void turn(const float* x, const int rows, const int cols, float* out) {
  for (int i = 0; i < rows; i += LANES) {
    for (int c = 0; c < cols; c += LANES) {
      float16 tile[LANES];
#pragma unroll
      for (int m = 0; m < LANES; m++) tile[m] = AT(x + (i + m) * SPAN + c);
      transpose_rows(tile);
#pragma unroll
      for (int m = 0; m < LANES; m++) AT(out + (c + m) * BLOCK + i) = tile[m];
    }
  }
}

// Turns scores of LANES queries into weights relative to their maximum so far; `worth` are the factors for earlier sums.
// Query 0 may read the first `open` keys and itself; each later query reads one key more.
inline void softmax_of_keys(float* scores, const int keys, const int open, const float factor, float16* top,
                            float16* total, float* worth) {
  float16 largest = *top;
  for (int c = 0; c < keys; c++) {
    const float16 x = forbid_before(AT(scores + c * BLOCK) * factor, c - open);
    largest = max(largest, x);
    AT(scores + c * BLOCK) = x;
  }
  const float16 now_worth = exp2_lanes(*top - largest);
  float16 sum = *total * now_worth;
  for (int c = 0; c < keys; c++) {
    const float16 weight = exp2_lanes(AT(scores + c * BLOCK) - largest);
    sum += weight;
    AT(scores + c * BLOCK) = weight;
  }
  *top = largest;
  *total = sum;
  AT(worth) = now_worth;
}

// global size: blocks of queries, heads
WORK_ITEM __kernel void attention(
    MATRIX(query), MATRIX(key), MATRIX(value), const int depth, const int width, const int inner, const int queries,
    const int keys, const int causal, const float scale, __global float* restrict out, __global float* restrict lse) {
  const int q0 = get_global_id(0) * BLOCK, head = get_global_id(1), outer = head / inner, within = head % inner;
  const int rows = min(queries - q0, BLOCK), end = causal ? min(keys, q0 + rows) : keys;
  float turned[SPAN * BLOCK] ALIGNED, key_rows[BLOCK * SPAN] ALIGNED, value_rows[BLOCK * SPAN] ALIGNED;
  float scores[BLOCK * BLOCK] ALIGNED, sums[BLOCK * SPAN] ALIGNED, worth[LANES] ALIGNED;
  float16 top[BLOCK / LANES], total[BLOCK / LANES];
  query = HEAD(query) + q0 * query_row;
  key = HEAD(key);
  value = HEAD(value);
  copy_rows(query, query_row, query_col, rows, depth, sums);
  turn(sums, rows, depth, turned);
  for (int r = 0; r < rows; r += LANES) {
    top[r / LANES] = (float16)(-INFINITY);
    total[r / LANES] = (float16)(0.0f);
  }
  for (int k0 = 0; k0 < end; k0 += BLOCK) {
    const int block = min(end - k0, BLOCK);
    copy_rows(key + k0 * key_row, key_row, key_col, block, depth, key_rows);
    copy_rows(value + k0 * value_row, value_row, value_col, block, width, value_rows);
    for (int r = 0; r < rows; r += LANES) {
      const int open = causal ? q0 + r - k0 : keys, count = min(block, open + LANES);
      for (int c = 0; c < count; c += LANES)
        score_tile(key_rows + c * SPAN, turned + r, depth, 1, scores + c * BLOCK + r);
      softmax_of_keys(scores + r, count, open, scale * M_LOG2E_F, top + r / LANES, total + r / LANES, worth);
      if (k0 > 0)
        for (int m = 0; m < LANES; m++)
          for (int c = 0; c < width; c += LANES) AT(sums + (r + m) * SPAN + c) *= worth[m];
      for (int c = 0; c < width; c += LANES) query_tile(scores + r, value_rows + c, count, k0 == 0, sums + r * SPAN + c);
    }
  }
  out += ((outer * queries + q0) * inner + within) * width;
  for (int r = 0; r < rows; r += LANES) {
    const float16 sum = total[r / LANES];
    store_upto(M_LN2_F * top[r / LANES] + log(sum), lse + head * queries + q0 + r, rows - r);
    AT(worth) = 1.0f / sum;
    for (int m = 0; m < min(rows - r, LANES); m++)
      for (int c = 0; c < width; c += LANES)
        store_upto(AT(sums + (r + m) * SPAN + c) * worth[m], out + (r + m) * inner * width + c, width - c);
  }
}

// Turns a tile of scores into weights, and products with grad_out into gradients of scores.
inline void weights_of_tile(float* scores, float* grads, const int open, const float scale, const float16 lse,
                            const float16 shift) {
  for (int c = 0; c < LANES; c++) {
    const float16 x = forbid_before(AT(scores + c * BLOCK) * (scale * M_LOG2E_F) - lse, c - open);
    const float16 weight = exp2_lanes(x);
    AT(scores + c * BLOCK) = weight;
    AT(grads + c * BLOCK) = weight * (AT(grads + c * BLOCK) - shift) * scale;
  }
}

// Adds `rows` rows of SPAN to `out`; with `fresh`, overwrites `out`.
inline void store_rows(const float* x, const int rows, const int cols, const int fresh, __global float* out,
                     const int out_row) {
  for (int i = 0; i < rows; i++) {
    for (int c = 0; c < cols; c += LANES) {
      __global float* at = out + i * out_row + c;
      const float16 sum = AT(x + i * SPAN + c);
      store_upto(fresh ? sum : sum + load_upto(at, cols - c), at, cols - c);
    }
  }
}

inline void clear_rows(__global float* out, const int out_row, const int rows, const int cols) {
  for (int i = 0; i < rows; i++)
    for (int c = 0; c < cols; c += LANES) store_upto((float16)(0.0f), out + i * out_row + c, cols - c);
}

// One head per work-item; gradients of its keys and values are summed directly in the results. global size: heads
WORK_ITEM __kernel void attention_backward(
    MATRIX(query), MATRIX(key), MATRIX(value), MATRIX(grad), MATRIX(out), __global const float* restrict lse,
    const int depth, const int width, const int inner, const int queries, const int keys, const int causal,
    const float scale, __global float* restrict grad_query, __global float* restrict grad_key,
    __global float* restrict grad_value) {
  const int head = get_global_id(0), outer = head / inner, within = head % inner;
  float query_rows[BLOCK * SPAN] ALIGNED, turned_query[SPAN * BLOCK] ALIGNED;
  float grad_rows[BLOCK * SPAN] ALIGNED, turned_grad[SPAN * BLOCK] ALIGNED;
  float key_rows[BLOCK * SPAN] ALIGNED, value_rows[BLOCK * SPAN] ALIGNED;
  float weights[BLOCK * BLOCK] ALIGNED, grads[BLOCK * BLOCK] ALIGNED;
  float sums[BLOCK * SPAN] ALIGNED, part[BLOCK * SPAN] ALIGNED, shift[BLOCK] ALIGNED;
  query = HEAD(query);
  key = HEAD(key);
  value = HEAD(value);
  grad = HEAD(grad);
  out = HEAD(out);
  grad_query += (outer * queries * inner + within) * depth;
  grad_key += (outer * keys * inner + within) * depth;
  grad_value += (outer * keys * inner + within) * width;
  lse += head * queries;
  const int read = causal ? min(keys, queries) : keys;
  clear_rows(grad_key + read * inner * depth, inner * depth, keys - read, depth);
  clear_rows(grad_value + read * inner * width, inner * width, keys - read, width);
  for (int q0 = 0; q0 < queries; q0 += BLOCK) {
    const int rows = min(queries - q0, BLOCK), end = causal ? min(keys, q0 + rows) : keys;
    copy_rows(query + q0 * query_row, query_row, query_col, rows, depth, query_rows);
    copy_rows(grad + q0 * grad_row, grad_row, grad_col, rows, width, grad_rows);
    turn(query_rows, rows, depth, turned_query);
    turn(grad_rows, rows, width, turned_grad);
    copy_rows(out + q0 * out_row, out_row, out_col, rows, width, part);
    for (int i = 0; i < FILLED(rows); i++) {
      float16 sum = (float16)(0.0f);
      for (int c = 0; c < width; c += LANES)
        sum = fma(AT(grad_rows + i * SPAN + c), AT(part + i * SPAN + c), sum);
      shift[i] = sum_lanes(sum);
    }
    for (int k0 = 0; k0 < end; k0 += BLOCK) {
      const int block = min(end - k0, BLOCK), fresh = q0 == (causal ? k0 : 0);
      copy_rows(key + k0 * key_row, key_row, key_col, block, depth, key_rows);
      copy_rows(value + k0 * value_row, value_row, value_col, block, width, value_rows);
      for (int r = 0; r < rows; r += LANES) {
        const int open = causal ? q0 + r - k0 : keys, count = min(block, open + LANES);
        const float16 row_lse = load_upto(lse + q0 + r, rows - r) * M_LOG2E_F, row_shift = AT(shift + r);
        for (int c = 0; c < count; c += LANES) {
          float *score = weights + c * BLOCK + r, *gradient = grads + c * BLOCK + r;
          score_tile(key_rows + c * SPAN, turned_query + r, depth, 1, score);
          score_tile(value_rows + c * SPAN, turned_grad + r, width, 1, gradient);
          weights_of_tile(score, gradient, open - c, scale, row_lse, row_shift);
        }
        for (int c = 0; c < depth; c += LANES)
          query_tile(grads + r, key_rows + c, count, k0 == 0, sums + r * SPAN + c);
      }
      for (int i = 0; i < block; i += LANES) {
        const int first = causal ? max(k0 + i - q0, 0) : 0;
        for (int c = 0; c < width; c += LANES)
          key_tile(weights + i * BLOCK + first, grad_rows + first * SPAN + c, rows - first, 1, part + i * SPAN + c);
      }
      store_rows(part, block, width, fresh, grad_value + k0 * inner * width, inner * width);
      for (int i = 0; i < block; i += LANES) {
        const int first = causal ? max(k0 + i - q0, 0) : 0;
        for (int c = 0; c < depth; c += LANES)
          key_tile(grads + i * BLOCK + first, query_rows + first * SPAN + c, rows - first, 1, part + i * SPAN + c);
      }
      store_rows(part, block, depth, fresh, grad_key + k0 * inner * depth, inner * depth);
    }
    store_rows(sums, rows, depth, 1, grad_query + q0 * inner * depth, inner * depth);
  }
}
