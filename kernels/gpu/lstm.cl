// A layer of an LSTM on GPUs, one time step at a time; gates are in the order i, f, g, o. Needs tile.cl and exp.cl before it.
//
//   gates_x, gates  [T][N][4H]    y, c  [T][N][H]    h0, c0  [N][H]    weight  w_hh [4H][H], any strides
//
// A launch computes a step. Neighbouring columns of its product are the four gates of a unit, so that a work-item has all
// four sums when it computes the unit's state.

#define GATES 4

inline float sigmoid(const float x) { return 1.0f / (1.0f + exact_exp(-x)); }

#define LOAD_4(x, at, is_inside) ((is_inside) ? *(__global const float4*)(x + (at)) : (float4)(0.0f))
#define LOAD_1(x, at, is_inside) ((is_inside) ? x[at] : 0.0f)
#define LOAD_H(line, k, exists) \
  JOIN(LOAD_, A_WIDTH)(h, (ROW0 + (line)) * hidden + (k), (exists) && ROW0 + (line) < batch)
#define LOAD_WEIGHT(line, k, exists)                                                                              \
  JOIN(LOAD_, B_WIDTH)                                                                                            \
  (weight, offset + ((COL0 + (line)) % GATES * hidden + (COL0 + (line)) / GATES) * w_row + (k) * w_col,           \
   (exists) && COL0 + (line) < GATES * hidden)

// global size: tiles of 4H, tiles of N (each times GROUP)
WORK_GROUP __kernel void lstm(__global const float* gates_x, __global const float* h0, __global const float* c0,
                              __global const float* weight, const int offset, const int w_row, const int w_col,
                              __global float* y, __global float* c, __global float* gates, const int step,
                              const int batch, const int hidden) {
  TILES;
  __global const float* h = step == 0 ? h0 : y + (step - 1) * batch * hidden;
  __global const float* before = step == 0 ? c0 : c + (step - 1) * batch * hidden;
  MULTIPLY(LOAD_H, LOAD_WEIGHT, 0, hidden)
  SLICES
    for (int e = ITEM_NUMBER; e < SLICE_ROWS * TILE / GATES; e += ITEMS) {
      const int line = e / (TILE / GATES), row = SLICE_ROW(line), unit = COL0 / GATES + e % (TILE / GATES);
      if (row < batch && unit < hidden) {
        const float4 sums_of_unit = *(__local const float4*)(slice + line * STRIDE + e % (TILE / GATES) * GATES);
        const int at = (step * batch + row) * GATES * hidden + unit, place = row * hidden + unit;
        const float i = sigmoid(sums_of_unit.x + gates_x[at]), f = sigmoid(sums_of_unit.y + gates_x[at + hidden]);
        const float g = tanh(sums_of_unit.z + gates_x[at + 2 * hidden]);
        const float o = sigmoid(sums_of_unit.w + gates_x[at + 3 * hidden]), cell = fma(f, before[place], i * g);
        gates[at] = i;
        gates[at + hidden] = f;
        gates[at + 2 * hidden] = g;
        gates[at + 3 * hidden] = o;
        c[step * batch * hidden + place] = cell;
        y[step * batch * hidden + place] = o * tanh(cell);
      }
    }
  SLICES_END
}
