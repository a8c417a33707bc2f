// Attention on CPUs, forward and backward, with memory linear in the length: behind common.cl and matmul.cl.
//
//   query, out    L rows of depth, of width      a head is one of `outer` x `inner` matrices
//   key, value    S rows of depth, of width      L = queries, S = keys
//   lse           [heads][L]                     logarithm of each row's sum of exponentials
//   right         [heads][ceil(columns / COLS)][rows][COLS]    a copy by panels of columns
//
// Out and the gradients are [outer][rows][inner][columns]: the heads of one row side by side.
// A matrix whose rows are the depth of a product (`value` in the forward) is read where it lies if its columns are
// contiguous and fill panels of COLS, else as `right`; `step` and `panel` are its strides in either case.
// CAPACITY, an option: room for so many panels of COLS columns in every matrix.
//
// Forward: softmax over blocks of keys with a running maximum (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018). Backward: Dao, "FlashAttention-2" (2023), algorithm 2, a head at a time.
// Causal tiles above the diagonal are left out.

#define BLOCK 96  // queries and keys at once: a multiple of ROWS and of COLS
#define SPAN (CAPACITY * COLS)

// Parameters of a batch of matrices; the last two are the strides `row`, `col`, or `step`, `panel`.
#define MATRIX(x, row, col)                                                                             \
  __global const float *restrict x, const int x##_offset, const int x##_outer, const int x##_inner,     \
      const int x##_##row, const int x##_##col
#define HEAD(x) (x + x##_offset + outer * x##_outer + within * x##_inner)
#define PANELS(n) (((n) + COLS - 1) / COLS)
#define ALIGNED __attribute__((aligned(64)))

// lo, hi += a b for `steps` of depth; a may lie in any address space, which OpenCL 1.2 has no pointer for.
#define MULTIPLY(lo, hi, steps, a, a_step, a_row, b, b_step)                           \
  for (int k = 0; k < (steps); k++) {                                                  \
    const float16 b_lo = vload16(0, (b) + k * (b_step));                               \
    const float16 b_hi = vload16(0, (b) + k * (b_step) + LANES);                       \
    _Pragma("unroll") for (int m = 0; m < ROWS; m++) {                                 \
      lo[m] = fma((float16)((a)[k * (a_step) + m * (a_row)]), b_lo, lo[m]);            \
      hi[m] = fma((float16)((a)[k * (a_step) + m * (a_row)]), b_hi, hi[m]);            \
    }                                                                                  \
  }

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

// -infinity in lanes behind the first `count`.
inline float16 forbid_from(const float16 x, const int count) {
  const int16 lane = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return count >= LANES ? x : select((float16)(-INFINITY), x, lane < count);
}

// Rows of x, depth-major by panels of COLS columns. global size: panels, heads
WORK_ITEM __kernel void attention_right(__global const float* x, const int offset, const int inner,
                                        const int outer_stride, const int inner_stride, const int stride_row,
                                        const int stride_col, const int rows, const int cols, __global float* right) {
  const int panel = get_global_id(0), head = get_global_id(1), count = min(cols - panel * COLS, COLS);
  x += offset + head / inner * outer_stride + head % inner * inner_stride + panel * COLS * stride_col;
  right += (head * (int)get_global_size(0) + panel) * rows * COLS;
  if (stride_col == 1)
    pack_contiguous(x, stride_row, count, COLS, 0, rows, right);
  else if (stride_row == 1)
    pack_transposed(x, stride_col, count, COLS, 0, rows, right);
  else
    pack_strided(x, stride_col, stride_row, count, COLS, 0, rows, right);
}

// Up to ROWS rows, SPAN apart, then zeros: the scalar operand of `dot_tile`.
inline void copy_rows(__global const float* x, const int stride_row, const int stride_col, const int rows,
                      const int depth, float* tile) {
  for (int m = 0; m < ROWS; m++)
    for (int k = 0; k < depth; k += LANES)
      vstore16(m < rows ? load_strided(x + m * stride_row + k * stride_col, stride_col, depth - k) : (float16)(0.0f), 0,
               tile + m * SPAN + k);
}

// Up to BLOCK rows as panels [depth][COLS] of their transpose, zero-padded: the vector operand of `dot_tile`.
inline void transpose_block(__global const float* x, const int stride_row, const int stride_col, const int rows,
                            const int depth, float* panels) {
  for (int row = 0; row < PANELS(rows) * COLS; row += LANES) {
    for (int k = 0; k < depth; k += LANES) {
      __global const float* from = x + row * stride_row + k * stride_col;
      float* to = panels + (row / COLS * depth + k) * COLS + row % COLS;
      float tile[LANES * LANES] ALIGNED;
      for (int i = 0; i < LANES; i++) {
        const bool there = row + i < rows;
        vstore16(there ? load_strided(from + i * stride_row, stride_col, depth - k) : (float16)(0.0f), i, tile);
      }
      transpose16(tile);
      for (int i = 0; i < min(depth - k, LANES); i++) vstore16(vload16(i, tile), 0, to + i * COLS);
    }
  }
}

// A tile of scores; its rows are BLOCK apart.
inline void dot_tile(const float* rows, const float* panel, const int depth, float* tile) {
  float16 lo[ROWS], hi[ROWS];
#pragma unroll
  for (int m = 0; m < ROWS; m++) lo[m] = hi[m] = (float16)(0.0f);
  MULTIPLY(lo, hi, depth, rows, 1, SPAN, panel, COLS)
#pragma unroll
  for (int m = 0; m < ROWS; m++) {
    vstore16(lo[m], 0, tile + m * BLOCK);
    vstore16(hi[m], 0, tile + m * BLOCK + LANES);
  }
}

// One row of scores becomes weights over the row's maximum so far; returns what earlier sums are worth now.
// `readable` of the `count` keys are open to the row.
inline float softmax_row(float* row, const int count, const int readable, const float factor, float* top,
                         float16* total) {
  float16 largest = (float16)(-INFINITY);
  for (int c = 0; c < count; c += LANES) {
    const float16 x = forbid_from(vload16(0, row + c) * factor, readable - c);
    largest = max(largest, x);
    vstore16(x, 0, row + c);
  }
  const float now = max(*top, max_lanes(largest));
  const float worth = exp2(*top - now);
  *top = now;
  *total *= worth;
  for (int c = 0; c < count; c += LANES) {
    const float16 weight = exp2_lanes(vload16(0, row + c) - now);
    *total += weight;
    vstore16(weight, 0, row + c);
  }
  return worth;
}

// global size: blocks of queries, heads
WORK_ITEM __kernel void attention(
    MATRIX(query, row, col), MATRIX(key, row, col), MATRIX(value, step, panel),
    const int depth, const int width, const int inner, const int queries, const int keys, const int causal,
    const float scale, __global float* restrict out, __global float* restrict lse) {
  const int q0 = get_global_id(0) * BLOCK, head = get_global_id(1), outer = head / inner, within = head % inner;
  const int rows = min(queries - q0, BLOCK), end = causal ? min(keys, q0 + rows) : keys;
  float panels[BLOCK * SPAN] ALIGNED, sums[BLOCK * SPAN] ALIGNED, tile[ROWS * SPAN] ALIGNED;
  float scores[ROWS * BLOCK] ALIGNED, top[BLOCK], worth[ROWS];
  float16 total[BLOCK];
  for (int i = 0; i < rows; i++) {
    top[i] = -INFINITY;
    total[i] = (float16)(0.0f);
  }
  query = HEAD(query) + q0 * query_row;
  key = HEAD(key);
  value = HEAD(value);
  for (int k0 = 0; k0 < end; k0 += BLOCK) {
    transpose_block(key + k0 * key_row, key_row, key_col, min(end - k0, BLOCK), depth, panels);
    for (int r = 0; r < rows; r += ROWS) {
      const int count = min((causal ? min(end, q0 + r + ROWS) : end) - k0, BLOCK), present = min(rows - r, ROWS);
      copy_rows(query + r * query_row, query_row, query_col, present, depth, tile);
      for (int c = 0; c < count; c += COLS) dot_tile(tile, panels + c * depth, depth, scores + c);
      for (int m = 0; m < present; m++) {
        const int readable = causal ? min(count, q0 + r + m + 1 - k0) : count;
        worth[m] = softmax_row(scores + m * BLOCK, count, readable, scale * M_LOG2E_F, top + r + m, total + r + m);
      }
      for (int m = present; m < ROWS; m++) worth[m] = 0.0f;
      for (int n = 0; n < PANELS(width); n++) {
        float16 lo[ROWS], hi[ROWS];
        float* at = sums + n * BLOCK * COLS + r * COLS;
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
          lo[m] = k0 == 0 ? (float16)(0.0f) : vload16(2 * m, at) * worth[m];
          hi[m] = k0 == 0 ? (float16)(0.0f) : vload16(2 * m + 1, at) * worth[m];
        }
        __global const float* b = value + n * value_panel + k0 * value_step;
        MULTIPLY(lo, hi, count, scores, 1, BLOCK, b, value_step)
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
          vstore16(lo[m], 2 * m, at);
          vstore16(hi[m], 2 * m + 1, at);
        }
      }
    }
  }
  out += ((outer * queries + q0) * inner + within) * width;
  for (int i = 0; i < rows; i++) {
    const float sum = sum_lanes(total[i]);
    lse[head * queries + q0 + i] = M_LN2_F * top[i] + log(sum);
    for (int c = 0; c < width; c += LANES) {
      const float16 x = vload16(0, sums + c / COLS * BLOCK * COLS + i * COLS + c % COLS);
      store_upto(x / sum, out + i * inner * width + c, width - c);
    }
  }
}

// A tile of out (+)= a b, of which `rows` and `cols` exist; a is read with strides `a_step` and `a_row`.
inline void add_tile(const float* a, const int a_step, const int a_row, __global const float* b, const int b_step,
                     const int steps, const int fresh, __global float* out, const int out_row, const int rows,
                     const int cols) {
  float16 sums[ROWS][2];  // in memory, before and after: loops over it stay small
  for (int m = 0; m < ROWS; m++) {
    const bool resume = !fresh && m < rows;
    sums[m][0] = resume ? load_upto(out + m * out_row, cols) : (float16)(0.0f);
    sums[m][1] = resume ? load_upto(out + m * out_row + LANES, cols - LANES) : (float16)(0.0f);
  }
  float16 lo[ROWS], hi[ROWS];
#pragma unroll
  for (int m = 0; m < ROWS; m++) {
    lo[m] = sums[m][0];
    hi[m] = sums[m][1];
  }
  MULTIPLY(lo, hi, steps, a, a_step, a_row, b, b_step)
#pragma unroll
  for (int m = 0; m < ROWS; m++) {
    sums[m][0] = lo[m];
    sums[m][1] = hi[m];
  }
  for (int m = 0; m < rows; m++) {
    store_upto(sums[m][0], out + m * out_row, cols);
    store_upto(sums[m][1], out + m * out_row + LANES, cols - LANES);
  }
}

// Scores become weights, and products with grad_out gradients of scores.
inline void weights_row(float* row, float* grad, const int count, const int readable, const float scale,
                        const float lse, const float shift) {
  for (int c = 0; c < count; c += LANES) {
    const float16 x = vload16(0, row + c) * (scale * M_LOG2E_F) - lse * M_LOG2E_F;
    const float16 weight = exp2_lanes(forbid_from(x, readable - c));
    vstore16(weight, 0, row + c);
    vstore16(weight * (vload16(0, grad + c) - shift) * scale, 0, grad + c);
  }
}

inline void clear_rows(__global float* out, const int out_row, const int rows, const int cols) {
  for (int m = 0; m < rows; m++)
    for (int c = 0; c < cols; c += LANES) store_upto((float16)(0.0f), out + m * out_row + c, cols - c);
}

// One head a work-item: gradients of its queries, keys and values are summed where they end up.
// `shift` [heads][L] is scratch. global size: heads
WORK_ITEM __kernel void attention_backward(
    MATRIX(query, row, col), MATRIX(key, row, col), MATRIX(value, row, col), MATRIX(grad, row, col),
    MATRIX(out, row, col), MATRIX(query_right, step, panel), MATRIX(key_right, step, panel),
    MATRIX(grad_right, step, panel), __global const float* restrict lse, const int depth, const int width,
    const int inner, const int queries, const int keys, const int causal, const float scale,
    __global float* restrict shift, __global float* restrict grad_query, __global float* restrict grad_key,
    __global float* restrict grad_value) {
  const int head = get_global_id(0), outer = head / inner, within = head % inner;
  float weights[BLOCK * BLOCK] ALIGNED, grads[BLOCK * BLOCK] ALIGNED, tile[ROWS * SPAN] ALIGNED;
  float key_panels[BLOCK * SPAN] ALIGNED, value_panels[BLOCK * SPAN] ALIGNED;
  for (int i = 0; i < BLOCK * BLOCK; i += LANES) {  // tiles of keys reach behind the last panel's columns
    vstore16((float16)(0.0f), 0, weights + i);
    vstore16((float16)(0.0f), 0, grads + i);
  }
  query = HEAD(query);
  key = HEAD(key);
  value = HEAD(value);
  grad = HEAD(grad);
  out = HEAD(out);
  query_right = HEAD(query_right);
  key_right = HEAD(key_right);
  grad_right = HEAD(grad_right);
  grad_query += (outer * queries * inner + within) * depth;
  grad_key += (outer * keys * inner + within) * depth;
  grad_value += (outer * keys * inner + within) * width;
  lse += head * queries;
  shift += head * queries;
  for (int i = 0; i < queries; i++) {
    float16 sum = (float16)(0.0f);
    for (int c = 0; c < width; c += LANES)
      sum = fma(load_strided(grad + i * grad_row + c * grad_col, grad_col, width - c),
                load_strided(out + i * out_row + c * out_col, out_col, width - c), sum);
    shift[i] = sum_lanes(sum);
  }
  for (int k0 = 0; k0 < keys; k0 += BLOCK) {
    const int count = min(keys - k0, BLOCK), begin = causal ? k0 : 0;
    if (begin >= queries) {  // keys that no query reads
      clear_rows(grad_key + k0 * inner * depth, inner * depth, count, depth);
      clear_rows(grad_value + k0 * inner * width, inner * width, count, width);
    }
    transpose_block(key + k0 * key_row, key_row, key_col, count, depth, key_panels);
    transpose_block(value + k0 * value_row, value_row, value_col, count, width, value_panels);
    for (int q0 = begin; q0 < queries; q0 += BLOCK) {
      const int rows = min(queries - q0, BLOCK);
      for (int r = 0; r < rows; r += ROWS) {
        const int limit = causal ? min(count, q0 + r + ROWS - k0) : count, present = min(rows - r, ROWS);
        float *weight = weights + r * BLOCK, *gradient = grads + r * BLOCK;
        copy_rows(query + (q0 + r) * query_row, query_row, query_col, present, depth, tile);
        for (int c = 0; c < limit; c += COLS) dot_tile(tile, key_panels + c * depth, depth, weight + c);
        copy_rows(grad + (q0 + r) * grad_row, grad_row, grad_col, present, width, tile);
        for (int c = 0; c < limit; c += COLS) dot_tile(tile, value_panels + c * width, width, gradient + c);
        for (int m = 0; m < present; m++) {
          const int i = q0 + r + m, readable = causal ? min(count, i + 1 - k0) : count;
          weights_row(weight + m * BLOCK, gradient + m * BLOCK, limit, readable, scale, lse[i], shift[i]);
        }
      }
      for (int n = 0; n < PANELS(depth); n++) {
        __global const float* b = key_right + n * key_right_panel + k0 * key_right_step;
        for (int r = 0; r < rows; r += ROWS) {
          const int limit = causal ? min(count, q0 + r + ROWS - k0) : count;
          add_tile(grads + r * BLOCK, 1, BLOCK, b, key_right_step, limit, k0 == 0,
                   grad_query + (q0 + r) * inner * depth + n * COLS, inner * depth, min(rows - r, ROWS),
                   depth - n * COLS);
        }
      }
      for (int n = 0; n < PANELS(width); n++) {
        for (int c = 0; c < count; c += ROWS) {
          const int first = causal ? max(k0 + c - q0, 0) : 0;
          __global const float* b = grad_right + n * grad_right_panel + (q0 + first) * grad_right_step;
          add_tile(weights + first * BLOCK + c, BLOCK, 1, b, grad_right_step,
                   rows - first, q0 == begin, grad_value + (k0 + c) * inner * width + n * COLS, inner * width,
                   min(count - c, ROWS), width - n * COLS);
        }
      }
      for (int n = 0; n < PANELS(depth); n++) {
        for (int c = 0; c < count; c += ROWS) {
          const int first = causal ? max(k0 + c - q0, 0) : 0;
          __global const float* b = query_right + n * query_right_panel + (q0 + first) * query_right_step;
          add_tile(grads + first * BLOCK + c, BLOCK, 1, b, query_right_step,
                   rows - first, q0 == begin, grad_key + (k0 + c) * inner * depth + n * COLS,
                   inner * depth, min(count - c, ROWS), depth - n * COLS);
        }
      }
    }
  }
}
