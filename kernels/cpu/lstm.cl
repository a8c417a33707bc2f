// A layer of an LSTM on CPUs, all steps in one launch; gates are in the order i, f, g, o.
//
//   gates_x, gates, grad_gates     [T][N][4H]
//   y, c, grad_y                   [T][N][H];  h0, c0, grad_h0, grad_c0, grad_last_c  [N][H]
//   weight    packed by matmul.cl's `pack_right`, zero-padded: for each gate panels [ceil(H / COLS)][H][COLS] of its part
//             of w_hh^T (forward), or panels [ceil(H / COLS)][4H][COLS] of w_hh (backward)
//   panel     scratch for this step and the next: [work-items][2][groups][gates][ceil(H / LANES)][ROWS][LANES], the left
//             operand of a step's product: h (`gates` is 1), or the gradients of four gates (`gates` is 4)
//
// Rows of a batch are independent, so a work-item takes `groups` groups of ROWS rows through time without a barrier.
// A step computes COLS units at a time: a product of ROWS rows with sums in registers, then the units' states from the sums.

#define COLS 32
#define GATES 4

// Cache lines that the next step reads or writes, of two tensors with 4H columns and of two with H. A product prefetches them
// one by one: many at once would stop the product. The lines have left all caches, since a step's weights passed through.
typedef struct {
  __global const float *wide, *other_wide, *narrow, *other_narrow;
  int stride;  // floats of the wide tensors to prefetch for each LANES of a product's depth
} Ahead;

inline void ask(const Ahead ahead, const int block) {
  const int at = block * ahead.stride;
  PREFETCH_WRITE(ahead.wide + at);
  PREFETCH_WRITE(ahead.other_wide + at);
  PREFETCH_WRITE(ahead.narrow + at / GATES);
  PREFETCH_WRITE(ahead.other_narrow + at / GATES);
}

// tanh from Cephes: a polynomial near zero, where 1 - 2 / (exp(2 x) + 1) would lose digits. The error is at most 2 ULP
inline float16 squash(const float16 x) {
  const float16 z = x * x, size = fabs(x);
  float16 p = fma(z, (float16)(-5.70498872745e-3f), (float16)(2.06390887954e-2f));
  p = fma(z, p, (float16)(-5.37397155531e-2f));
  p = fma(z, p, (float16)(1.33314422036e-1f));
  p = fma(z, p, (float16)(-3.33332819422e-1f));
  const float16 near = fma(z * x, p, x);
  const float16 far = copysign(1.0f - 2.0f / (exact_exp(2.0f * size) + 1.0f), x);
  return select(near, far, size > (float16)(0.625f));
}

inline float16 sigmoid(const float16 x) { return 1.0f / (1.0f + exact_exp(-x)); }

// Sums of a tile: rows of a panel times COLS columns, over `gates` parts of `depth` each. Prefetches lines from `block` on.
inline void multiply(__global const float* a, __global const float* w, const int gates, const int depth, const Ahead ahead,
                     int block, float16 sums[ROWS][2]) {
  float16 lo[ROWS], hi[ROWS];
#pragma unroll
  for (int m = 0; m < ROWS; m++) lo[m] = hi[m] = (float16)(0.0f);
  for (int gate = 0; gate < gates; gate++) {
    for (int k0 = 0; k0 < depth; k0 += LANES) {
      ask(ahead, block++);
      const int count = min(depth - k0, LANES);
      for (int k = 0; k < count; k++) {
        const float16 w_lo = vload16(0, w), w_hi = vload16(1, w);
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
          const float16 x = (float16)(a[m * LANES + k]);
          lo[m] = fma(x, w_lo, lo[m]);
          hi[m] = fma(x, w_hi, hi[m]);
        }
        w += COLS;
      }
      a += ROWS * LANES;
    }
  }
#pragma unroll
  for (int m = 0; m < ROWS; m++) {
    sums[m][0] = lo[m];
    sums[m][1] = hi[m];
  }
}

// Global size: work-items
WORK_ITEM __kernel void lstm(__global const float* restrict gates_x, __global const float* restrict h0,
                             __global const float* restrict c0, __global const float* restrict weight,
                             __global float* panel, __global float* restrict y, __global float* c,
                             __global float* gates, const int steps, const int batch, const int hidden,
                             const int groups) {
  const int first = (int)get_global_id(0) * groups * ROWS, rows = min(batch - first, groups * ROWS);
  const int cols = GATES * hidden, panels = (hidden + COLS - 1) / COLS, blocks = (hidden + LANES - 1) / LANES;
  const int group_size = blocks * LANES * ROWS;
  __global float* now = panel + (int)get_global_id(0) * 2 * groups * group_size;
  __global float* next = now + groups * group_size;
  for (int i = 0; i < 2 * groups * group_size; i++) now[i] = 0.0f;
  for (int row = 0; row < rows; row++)
    for (int u = 0; u < hidden; u++)
      now[row / ROWS * group_size + u / LANES * ROWS * LANES + row % ROWS * LANES + u % LANES] =
          h0[(first + row) * hidden + u];
  for (int t = 0; t < steps; t++) {
    const int after = min(t + 1, steps - 1) * batch + first;
    const Ahead ahead = {gates_x + after * cols, gates + after * cols, y + after * hidden, c + after * hidden,
                         rows * hidden / (panels * groups * blocks)};
    for (int u0 = 0; u0 < hidden; u0 += COLS) {
      for (int group = 0; group < groups; group++) {
        const int top = group * ROWS, count = min(rows - top, ROWS), step = t * batch + first + top;
        float16 sums[GATES][ROWS][2];
#pragma unroll 1
        for (int gate = 0; gate < GATES; gate++)
          multiply(now + group * group_size, weight + (gate * panels * COLS + u0) * hidden, 1, hidden, ahead,
                   ((u0 / COLS * groups + group) * GATES + gate) * blocks, sums[gate]);
        __global const float* before = t == 0 ? c0 + (first + top) * hidden : c + (step - batch) * hidden;
        for (int m = 0; m < count; m++) {
#pragma unroll 1
          for (int n = 0; n < 2 && u0 + n * LANES < hidden; n++) {
            const int u = u0 + n * LANES, left = hidden - u, at = (step + m) * cols + u;
            float16 v[GATES];  // in memory: the loops over it stay small
#pragma unroll 1
            for (int gate = 0; gate < GATES; gate++)
              v[gate] = sums[gate][m][n] + load_upto(gates_x + at + gate * hidden, left);
            const float16 i = v[0] = sigmoid(v[0]), f = v[1] = sigmoid(v[1]), g = v[2] = squash(v[2]);
            const float16 o = v[3] = sigmoid(v[3]);
            const float16 cell = fma(f, load_upto(before + m * hidden + u, left), i * g), h = o * squash(cell);
#pragma unroll 1
            for (int gate = 0; gate < GATES; gate++) store_upto(v[gate], gates + at + gate * hidden, left);
            store_upto(cell, c + (step + m) * hidden + u, left);
            store_upto(h, y + (step + m) * hidden + u, left);
            vstore16(h, 0, next + group * group_size + u * ROWS + m * LANES);
          }
        }
      }
    }
    __global float* other = now;
    now = next;
    next = other;
  }
}

// Replaces the four gates by the gradients of their inputs. Returns the gradient of the previous step's cell; `dh` and
// `dc_after` are the gradients of h and of this step's cell.
inline float16 gate_gradients(float16 v[GATES], const float16 cell, const float16 before, const float16 dh,
                              const float16 dc_after) {
  const float16 i = v[0], f = v[1], g = v[2], o = v[3], s = squash(cell);
  const float16 dc = fma(dh * o, 1.0f - s * s, dc_after);
  v[0] = dc * g * i * (1.0f - i);
  v[1] = dc * before * f * (1.0f - f);
  v[2] = dc * i * (1.0f - g * g);
  v[3] = dh * s * o * (1.0f - o);
  return dc * f;
}

// A step begins with a product, the gradient of its h from later steps; the last such product is grad_h0. grad_c0 carries the
// gradient of the cells from step to step. Global size: work-items
WORK_ITEM __kernel void lstm_backward(__global const float* restrict grad_y, __global const float* restrict grad_last_c,
                                      const int has_grad_last_c, __global const float* restrict gates,
                                      __global const float* restrict c, __global const float* restrict c0,
                                      __global const float* restrict weight, __global float* panel,
                                      __global float* restrict grad_gates, __global float* restrict grad_h0,
                                      __global float* restrict grad_c0, const int steps, const int batch,
                                      const int hidden, const int groups) {
  const int first = (int)get_global_id(0) * groups * ROWS, rows = min(batch - first, groups * ROWS);
  const int cols = GATES * hidden, panels = (hidden + COLS - 1) / COLS, blocks = (hidden + LANES - 1) / LANES;
  const int gate_size = blocks * LANES * ROWS, group_size = GATES * gate_size;
  __global float* now = panel + (int)get_global_id(0) * 2 * groups * group_size;
  __global float* next = now + groups * group_size;
  for (int i = 0; i < 2 * groups * group_size; i++) now[i] = 0.0f;
  for (int i = first * hidden; i < (first + rows) * hidden; i++) grad_c0[i] = has_grad_last_c ? grad_last_c[i] : 0.0f;
  for (int t = steps - 1; t >= -1; t--) {
    const int after = max(t - 1, 0) * batch + first, before_after = max(t - 2, 0) * batch + first;
    const Ahead ahead = {gates + after * cols, grad_gates + after * cols, grad_y + after * hidden,
                         c + before_after * hidden, rows * hidden / (panels * groups * blocks)};
    for (int u0 = 0; u0 < hidden; u0 += COLS) {
      for (int group = 0; group < groups; group++) {
        const int top = group * ROWS, count = min(rows - top, ROWS), step = t * batch + first + top;
        float16 sums[ROWS][2];
        multiply(now + group * group_size, weight + u0 * cols, GATES, t == steps - 1 ? 0 : hidden, ahead,
                 (u0 / COLS * groups + group) * GATES * blocks, sums);
        if (t < 0) {
          for (int m = 0; m < count; m++)
#pragma unroll 1
            for (int n = 0; n < 2; n++)
              store_upto(sums[m][n], grad_h0 + (first + top + m) * hidden + u0 + n * LANES, hidden - u0 - n * LANES);
          continue;
        }
        __global const float* before = t == 0 ? c0 + (first + top) * hidden : c + (step - batch) * hidden;
        for (int m = 0; m < count; m++) {
#pragma unroll 1
          for (int n = 0; n < 2 && u0 + n * LANES < hidden; n++) {
            const int u = u0 + n * LANES, left = hidden - u;
            __global const float* a = gates + (step + m) * cols + u;
            __global float* d = grad_gates + (step + m) * cols + u;
            __global float* dc_row = grad_c0 + (first + top + m) * hidden + u;
            float16 v[GATES];
#pragma unroll 1
            for (int gate = 0; gate < GATES; gate++) v[gate] = load_upto(a + gate * hidden, left);
            const float16 dh = sums[m][n] + load_upto(grad_y + (step + m) * hidden + u, left);
            const float16 dc = gate_gradients(v, load_upto(c + (step + m) * hidden + u, left),
                                              load_upto(before + m * hidden + u, left), dh, load_upto(dc_row, left));
            store_upto(dc, dc_row, left);
#pragma unroll 1
            for (int gate = 0; gate < GATES; gate++) {
              store_upto(v[gate], d + gate * hidden, left);
              vstore16(v[gate], 0, next + group * group_size + gate * gate_size + u * ROWS + m * LANES);
            }
          }
        }
      }
    }
    __global float* other = now;
    now = next;
    next = other;
  }
}
