// Batch norm of the channels of a convolution, in training: see rows.cl. A row is a channel, with the pixels of all images.
//
// It writes received vectors to row_y, [N][row_channels][row_pixels], and sums them. Each lane and vector of a tile has a sum,
// so additions to one sum are TILE_ROWS * INTERLEAVE_COLS cycles apart. When a tile's rows are complete, it reads them again,
// first for the variance about the mean, then to normalise them. Rows have any length.

#define ROW_ARGUMENTS                                                                                                    \
  __global const float* restrict row_weight, const int row_has_weight, __global const float* restrict row_bias,          \
      const int row_has_bias, __global const float* restrict row_running_mean,                                           \
      __global const float* restrict row_running_var, const int row_has_running, __global float* restrict row_y,         \
      __global float* restrict row_mean, __global float* restrict row_rstd, __global float* restrict row_new_mean,       \
      __global float* restrict row_new_var, const int row_channels, const int row_pixels, const float row_momentum,      \
      const float row_eps
#define IN_Y(row, col) \
  row_y[((col) / row_pixels * row_channels + batch * rows + (row)) * row_pixels + (col) % row_pixels]

#define STRIP b_vector row_sums[TILE_ROWS * INTERLEAVE_COLS]
#define TAKE(vector)                                                                       \
  {                                                                                        \
    float taken[ARRAY_COLS];                                                               \
    STORE_B(vector, 0, taken);                                                             \
    UNROLLED(ARRAY_COLS) for (int lane = 0; lane < ARRAY_COLS; lane++) {                   \
      const int row = row0 + ROW_AT;                                                       \
      const int col = col0 + at % INTERLEAVE_COLS * ARRAY_COLS + lane;                     \
      if (row < rows && col < cols)                                                        \
        IN_Y(row, col) = taken[lane];                                                      \
      else                                                                                 \
        taken[lane] = 0.0f;                                                                \
    }                                                                                      \
    row_sums[at] = LOAD_B(0, taken) + (col0 == 0 ? (b_vector)(0.0f) : row_sums[at]);       \
  }
#define NORMALISE                                                                                                \
  EACH_ROW if (IN_C) {                                                                                           \
    b_vector sums = row_sums[r * INTERLEAVE_COLS];                                                               \
    for (int i = 1; i < INTERLEAVE_COLS; i++) sums += row_sums[r * INTERLEAVE_COLS + i];                         \
    float lane_sums[ARRAY_COLS], squares[TURNS], mean = 0.0f, sum = 0.0f;                                        \
    STORE_B(sums, 0, lane_sums);                                                                                 \
    for (int i = 0; i < ARRAY_COLS; i++) mean += lane_sums[i];                                                   \
    mean /= cols;                                                                                                \
    for (int i = 0; i < TURNS; i++) squares[i] = 0.0f;                                                           \
    EACH_COL {                                                                                                   \
      const float x = IN_Y(row0 + r, j) - mean;                                                                  \
      squares[j % TURNS] = fma(x, x, squares[j % TURNS]);                                                        \
    }                                                                                                            \
    for (int i = 0; i < TURNS; i++) sum += squares[i];                                                           \
    const int number = ROW_NUMBER;                                                                               \
    const float rstd = 1.0f / sqrt(sum / cols + row_eps), rest = 1.0f - row_momentum;                            \
    row_mean[number] = mean;                                                                                     \
    row_rstd[number] = rstd;                                                                                     \
    if (row_has_running) {                                                                                       \
      row_new_mean[number] = fma(row_momentum, mean, rest * row_running_mean[number]);                           \
      row_new_var[number] = fma(row_momentum, sum / (cols - 1), rest * row_running_var[number]);                 \
    }                                                                                                            \
    const float scale = rstd * (row_has_weight ? row_weight[number] : 1.0f);                                     \
    const float shift = fma(-mean, scale, row_has_bias ? row_bias[number] : 0.0f);                               \
    EACH_COL IN_Y(row0 + r, j) = fma(IN_Y(row0 + r, j), scale, shift);                                           \
  }
