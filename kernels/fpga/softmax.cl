// Softmax of the rows of a product, or its logarithm: see rows.cl.

#define ROW_ARGUMENTS __global float* restrict row_y, const int row_logarithm
#define NORMALISE                                                                        \
  float peaks[TILE_ROWS], sums[TILE_ROWS];                                               \
  EACH_ROW { peaks[r] = -INFINITY; sums[r] = 0.0f; }                                     \
  EACH_COL EACH_ROW peaks[r] = fmax(peaks[r], strip[r][j]);                              \
  EACH_COL EACH_ROW sums[r] += exp(strip[r][j] - peaks[r]);                              \
  EACH_ROW sums[r] = row_logarithm ? log(sums[r]) : 1.0f / sums[r];                      \
  EACH_COL EACH_ROW if (IN_C) {                                                          \
    const float x = strip[r][j] - peaks[r];                                              \
    row_y[ROW_NUMBER * cols + j] = row_logarithm ? x - sums[r] : exp(x) * sums[r];       \
  }
