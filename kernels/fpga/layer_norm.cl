// Layer norm of the rows of a product: see rows.cl. mean and rstd have one number per row.

#define ROW_ARGUMENTS                                                                                     \
  __global const float* restrict row_weight, const int row_has_weight, __global const float* restrict row_bias, \
      const int row_has_bias, __global float* restrict row_y, __global float* restrict row_mean,          \
      __global float* restrict row_rstd, const float row_eps
#define NORMALISE                                                                        \
  float means[TILE_ROWS], rstds[TILE_ROWS];                                              \
  EACH_ROW means[r] = rstds[r] = 0.0f;                                                   \
  EACH_COL EACH_ROW means[r] += strip[r][j];                                             \
  EACH_ROW means[r] /= cols;                                                             \
  EACH_COL EACH_ROW {                                                                    \
    const float x = strip[r][j] - means[r];                                              \
    rstds[r] = fma(x, x, rstds[r]);                                                      \
  }                                                                                      \
  EACH_ROW {                                                                             \
    rstds[r] = 1.0f / sqrt(rstds[r] / cols + row_eps);                                   \
    if (IN_C) {                                                                          \
      row_mean[ROW_NUMBER] = means[r];                                                   \
      row_rstd[ROW_NUMBER] = rstds[r];                                                   \
    }                                                                                    \
  }                                                                                      \
  EACH_COL EACH_ROW if (IN_C) {                                                          \
    const float x = (strip[r][j] - means[r]) * rstds[r];                                 \
    const float weight = row_has_weight ? row_weight[j] : 1.0f;                          \
    row_y[ROW_NUMBER * cols + j] = fma(x, weight, row_has_bias ? row_bias[j] : 0.0f);    \
  }
