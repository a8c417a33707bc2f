// Layer normalisation on graphics cards. Needs rows.cl before it.
//
//   x, y, dy, dx   [rows][length]   mean, rstd   [rows]   weight, bias   [length]
// Variances are taken about the mean in a second pass; the caches still have the row.

WORK_GROUP __kernel void layer_norm(__global const float* restrict x, __global const float* weight, const int has_weight,
                                    __global const float* bias, const int has_bias, __global float* restrict y,
                                    __global float* restrict save_mean, __global float* restrict save_rstd,
                                    const int rows, const int length, const float eps) {
  __local float tree[GROUP];
  const int row = ROW, count = row < rows ? length : 0;
  x += row * length;
  y += row * length;
  float sum = 0.0f, squares = 0.0f;
  EACH(i, count) sum += x[i];
  const float mean = sum_of_row(sum, tree) / length;
  EACH(i, count) {
    const float d = x[i] - mean;
    squares = fma(d, d, squares);
  }
  const float rstd = 1.0f / sqrt(sum_of_row(squares, tree) / length + eps);
  if (LANE == 0 && row < rows) {
    save_mean[row] = mean;
    save_rstd[row] = rstd;
  }
  EACH(i, count) {
    float v = (x[i] - mean) * rstd;
    if (has_weight) v *= weight[i];
    if (has_bias) v += bias[i];
    y[i] = v;
  }
}

WORK_GROUP __kernel void layer_norm_dx(__global const float* restrict dy, __global const float* restrict x,
                                       __global const float* mean, __global const float* rstd,
                                       __global const float* weight, const int has_weight, __global float* restrict dx,
                                       const int rows, const int length) {
  __local float2 tree[GROUP];
  const int row = ROW, count = row < rows ? length : 0;
  const float center = count ? mean[row] : 0.0f, scale = count ? rstd[row] : 0.0f;
  dy += row * length;
  x += row * length;
  dx += row * length;
  float sum = 0.0f, dots = 0.0f;
  EACH(i, count) {
    const float g = has_weight ? dy[i] * weight[i] : dy[i];
    sum += g;
    dots = fma(g, (x[i] - center) * scale, dots);
  }
  const float2 means = sums_of_row((float2)(sum, dots), tree) / length;
  EACH(i, count) {
    const float g = has_weight ? dy[i] * weight[i] : dy[i];
    dx[i] = (g - means.x - (x[i] - center) * scale * means.y) * scale;
  }
}
