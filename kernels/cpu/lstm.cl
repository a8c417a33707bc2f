// A layer of an LSTM on CPUs, all its steps in one launch; gates in the order i, f, g, o.
//
//   gates_x, gates, grad_gates     [T][N][4H]
//   y, c, grad_y                   [T][N][H];  h0, c0, grad_h0, grad_c0, grad_last_c  [N][H]
//   weight    packed by matmul.cl's `pack_right`: panels [columns / COLS][depth][COLS] of w_hh^T (forward: depth H,
//             4H columns) or of w_hh (backward: depth 4H, H columns), zero-padded
//   panel     scratch [work-items][groups][depth][ROWS]: the left operand of a step's product, zero-padded
//
// Rows of a batch depend on no other, so a work-item takes `groups` groups of ROWS rows through time without a barrier.
// A step is a product (ROWS x COLS accumulators in registers, as in matmul.cl) and a pass over the cells.

#define COLS 32

// tanh of Cephes: a polynomial near zero, where 1 - 2 / (exp(2 x) + 1) would cancel. At most 2 ULP
inline float16 squash(const float16 x) {
  const float16 z = x * x, size = fabs(x);
  float16 p = fma(z, (float16)(-5.70498872745e-3f), (float16)(2.06390887954e-2f));
  p = fma(z, p, (float16)(-5.37397155531e-2f));
  p = fma(z, p, (float16)(1.33314422036e-1f));
  p = fma(z, p, (float16)(-3.33332819422e-1f));
  const float16 near = fma(z * x, p, x);
  const float16 far = copysign(1.0f - 2.0f / (exp(2.0f * size) + 1.0f), x);
  return select(near, far, size > (float16)(0.625f));
}

inline float16 sigmoid(const float16 x) { return 1.0f / (1.0f + exp(-x)); }

// Column `row` of a panel at rows `k` and below gets the first `count` lanes.
inline void spread(const float16 value, __global float* panel, const int count) {
  float lane[LANES];
  vstore16(value, 0, lane);
  for (int i = 0; i < min(count, LANES); i++) panel[i * ROWS] = lane[i];
}

// out = start + panel * weight for `rows` rows of `cols` columns, `stride` apart; without `start` if it is 0.
inline void multiply(__global const float* panel, __global const float* weight, const int depth,
                     __global const float* start, __global float* out, const int rows, const int cols,
                     const int stride) {
  float16 sums[ROWS][2];  // in memory, before and after: loops over it stay small
  for (int m = 0; m < ROWS; m++) {
    const bool resume = start != 0 && m < rows;
    sums[m][0] = resume ? load_upto(start + m * stride, cols) : (float16)(0.0f);
    sums[m][1] = resume ? load_upto(start + m * stride + LANES, cols - LANES) : (float16)(0.0f);
  }
  float16 lo[ROWS], hi[ROWS];
#pragma unroll
  for (int m = 0; m < ROWS; m++) {
    lo[m] = sums[m][0];
    hi[m] = sums[m][1];
  }
  for (int k = 0; k < depth; k++) {
    const float16 w_lo = vload16(0, weight), w_hi = vload16(1, weight);
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
      lo[m] = fma((float16)(panel[m]), w_lo, lo[m]);
      hi[m] = fma((float16)(panel[m]), w_hi, hi[m]);
    }
    panel += ROWS;
    weight += COLS;
  }
#pragma unroll
  for (int m = 0; m < ROWS; m++) {
    sums[m][0] = lo[m];
    sums[m][1] = hi[m];
  }
  for (int m = 0; m < rows; m++) {
    store_upto(sums[m][0], out + m * stride, cols);
    store_upto(sums[m][1], out + m * stride + LANES, cols - LANES);
  }
}

// The same for all rows of a work-item; the columns' panel outside, so that it stays in a first-level cache.
inline void multiply_rows(__global const float* panel, __global const float* weight, const int depth,
                          __global const float* start, __global float* out, const int rows, const int cols) {
  for (int col = 0; col < cols; col += COLS)
    for (int row = 0; row < rows; row += ROWS) {
      const int at = row * cols + col;
      multiply(panel + row * depth, weight + col * depth, depth, start == 0 ? start : start + at, out + at,
               rows - row < ROWS ? rows - row : ROWS, cols - col, cols);
    }
}

// Global size: work-items
WORK_ITEM __kernel void lstm(__global const float* restrict gates_x, __global const float* restrict h0,
                             __global const float* restrict c0, __global const float* restrict weight,
                             __global float* panel, __global float* restrict y, __global float* c,
                             __global float* gates, const int steps, const int batch, const int hidden,
                             const int groups) {
  const int first = (int)get_global_id(0) * groups * ROWS, rows = min(batch - first, groups * ROWS);
  const int cols = 4 * hidden;
  panel += first * hidden;
  for (int i = 0; i < groups * ROWS * hidden; i++) panel[i] = 0.0f;
  for (int row = 0; row < rows; row++)
    for (int u = 0; u < hidden; u++)
      panel[(row / ROWS * hidden + u) * ROWS + row % ROWS] = h0[(first + row) * hidden + u];
  for (int t = 0; t < steps; t++) {
    const int step = t * batch + first;
    multiply_rows(panel, weight, hidden, gates_x + step * cols, gates + step * cols, rows, cols);
    for (int row = 0; row < rows; row++) {
      __global float* a = gates + (step + row) * cols;
      __global const float* before = t == 0 ? c0 + (first + row) * hidden : c + (step - batch + row) * hidden;
      for (int u = 0; u < hidden; u += LANES) {
        const int count = hidden - u, at = (step + row) * hidden + u;
        const float16 i = sigmoid(load_upto(a + u, count)), f = sigmoid(load_upto(a + hidden + u, count));
        const float16 g = squash(load_upto(a + 2 * hidden + u, count));
        const float16 o = sigmoid(load_upto(a + 3 * hidden + u, count));
        const float16 cell = fma(f, load_upto(before + u, count), i * g), h = o * squash(cell);
        store_upto(i, a + u, count);
        store_upto(f, a + hidden + u, count);
        store_upto(g, a + 2 * hidden + u, count);
        store_upto(o, a + 3 * hidden + u, count);
        store_upto(cell, c + at, count);
        store_upto(h, y + at, count);
        spread(h, panel + (row / ROWS * hidden + u) * ROWS + row % ROWS, count);
      }
    }
  }
}

// grad_h0 and grad_c0 carry from step to step what they are in the end. Global size: work-items
WORK_ITEM __kernel void lstm_backward(__global const float* restrict grad_y, __global const float* restrict grad_last_c,
                                      const int has_grad_last_c, __global const float* restrict gates,
                                      __global const float* restrict c, __global const float* restrict c0,
                                      __global const float* restrict weight, __global float* panel,
                                      __global float* restrict grad_gates, __global float* grad_h0,
                                      __global float* grad_c0, const int steps, const int batch, const int hidden,
                                      const int groups) {
  const int first = (int)get_global_id(0) * groups * ROWS, rows = min(batch - first, groups * ROWS);
  const int cols = 4 * hidden;
  panel += first * cols;
  for (int i = 0; i < groups * ROWS * cols; i++) panel[i] = 0.0f;
  for (int i = first * hidden; i < (first + rows) * hidden; i++) {
    grad_h0[i] = 0.0f;
    grad_c0[i] = has_grad_last_c ? grad_last_c[i] : 0.0f;
  }
  for (int t = steps - 1; t >= 0; t--) {
    const int step = t * batch + first;
    for (int row = 0; row < rows; row++) {
      __global const float* a = gates + (step + row) * cols;
      __global float* d = grad_gates + (step + row) * cols;
      __global const float* before = t == 0 ? c0 + (first + row) * hidden : c + (step - batch + row) * hidden;
      __global float* dh_row = grad_h0 + (first + row) * hidden;
      __global float* dc_row = grad_c0 + (first + row) * hidden;
      __global float* column = panel + row / ROWS * cols * ROWS + row % ROWS;
      for (int u = 0; u < hidden; u += LANES) {
        const int count = hidden - u, at = (step + row) * hidden + u;
        const float16 i = load_upto(a + u, count), f = load_upto(a + hidden + u, count);
        const float16 g = load_upto(a + 2 * hidden + u, count), o = load_upto(a + 3 * hidden + u, count);
        const float16 s = squash(load_upto(c + at, count));
        const float16 dh = load_upto(dh_row + u, count) + load_upto(grad_y + at, count);
        const float16 dc = fma(dh * o, 1.0f - s * s, load_upto(dc_row + u, count));
        const float16 di = dc * g * i * (1.0f - i), df = dc * load_upto(before + u, count) * f * (1.0f - f);
        const float16 dg = dc * i * (1.0f - g * g), d_o = dh * s * o * (1.0f - o);
        store_upto(di, d + u, count);
        store_upto(df, d + hidden + u, count);
        store_upto(dg, d + 2 * hidden + u, count);
        store_upto(d_o, d + 3 * hidden + u, count);
        store_upto(dc * f, dc_row + u, count);
        spread(di, column + u * ROWS, count);
        spread(df, column + (hidden + u) * ROWS, count);
        spread(dg, column + (2 * hidden + u) * ROWS, count);
        spread(d_o, column + (3 * hidden + u) * ROWS, count);
      }
    }
    multiply_rows(panel, weight, cols, 0, grad_h0 + first * hidden, rows, hidden);
  }
}
